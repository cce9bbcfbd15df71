"""A conversation with the run's own model, and with a scripted server."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.compose import compose_run_config
from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.tokenizers import Message
from pipelines import pipeline
from pipelines.jobs.interrupt import Interruption, interruption
from pipelines.server.endpoint import Endpoint, EventLines, asked_for
from pipelines.tasks.chat import Conversation, LocalModel, Say
from tests.helpers.cases import each
from tests.helpers.chat_server import ChatServer, chat_server, chunk
from tests.helpers.command import refusal, run


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


DECODE = ["decode.max_new_tokens=12", "decode.temperature=0.0"]


@pytest.fixture(scope="module")
def local() -> LocalModel:
    return LocalModel(compose_run_config(["task=chat", "device=cpu", *DECODE]))


def expected(messages: list[Message]) -> str:
    pipe = pipeline("text_generation", device="cpu", overrides=DECODE)
    (result,) = pipe(messages, return_full_text=False)
    (text,) = result["text_generation_text"]
    return str(text)


def test_every_turn_sees_those_before_it(local: LocalModel, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(local, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for said in ("Which pair has an owl?", "你好"):
        messages.append({"role": "user", "content": said})
        conversation.say(said)
        answer = expected(messages)
        assert capsys.readouterr().out == f"{answer}\n"
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.long
def test_a_conversation_is_forgotten_and_told_something_else(
    local: LocalModel, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(local, system=None)
    conversation.say("Once upon a time")
    for command, messages in [
        ("/reset", []),
        ("/system Be kind.", [{"role": "system", "content": "Be kind."}]),
        ("/system", []),
    ]:
        assert conversation.command(command)
        capsys.readouterr()
        conversation.say("Who?")
        assert capsys.readouterr().out == expected([*messages, {"role": "user", "content": "Who?"}]) + "\n"


class Interrupting:
    """Sends SIGINT with the second piece of the first answer."""

    def __init__(self, speaker: LocalModel | Endpoint) -> None:
        self.speaker = speaker
        self.heard: list[list[Message]] = []

    def answer(self, messages: list[Message], say: Say, signals: Interruption) -> str:
        self.heard.append(messages)
        pieces = []

        def hooked(piece: str) -> None:
            say(piece)
            pieces.append(piece)
            if len(self.heard) == 1 and len(pieces) == 2:
                os.kill(os.getpid(), signal.SIGINT)

        return self.speaker.answer(messages, hooked, signals)


def test_ctrl_c_stops_the_answer_which_stays_as_far_as_it_came(
    local: LocalModel, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker = Interrupting(local)
    conversation = Conversation(speaker, system=None)
    conversation.say("Tell me a long story")
    printed = capsys.readouterr().out.removesuffix("\n")
    assert expected([{"role": "user", "content": "Tell me a long story"}]).startswith(printed)
    conversation.say("Go on")
    assert speaker.heard[1][1] == {"role": "assistant", "content": printed}
    local._engine.scheduler.check_integrity()
    assert not local._engine.scheduler.running


def test_ctrl_c_leaves_a_servers_answer(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    speaker = Interrupting(Endpoint(server.url, None, DecodeConfig()))
    conversation = Conversation(speaker, system=None)
    conversation.say("an endless story")
    assert server.left.wait(60)
    printed = capsys.readouterr().out.removesuffix("\n")
    assert printed.startswith("更多 更多 ")
    server.lines = [chunk(content="Yes"), "data: [DONE]"]
    conversation.say("Go on")
    assert capsys.readouterr().out == "Yes\n"
    assert speaker.heard[1][1] == {"role": "assistant", "content": printed}


def test_a_message_that_does_not_fit_is_one_line_and_the_conversation_continues(
    local: LocalModel, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(local, system=None)
    conversation.say("owl " * 3000)
    assert capsys.readouterr().out.startswith("error: the prompt has ")
    conversation.say("Who?")
    assert capsys.readouterr().out == expected([{"role": "user", "content": "Who?"}]) + "\n"


def test_commands_are_listed_and_typing_errors_named(capsys: pytest.CaptureFixture[str], local: LocalModel) -> None:
    conversation = Conversation(local, system=None)
    assert conversation.command("/help")
    assert "/system TEXT" in capsys.readouterr().out
    assert conversation.command("/restet")
    assert capsys.readouterr().out == "/restet is no command: /help lists them, and //restet says it to the model\n"
    assert not conversation.command("/exit")


@pytest.mark.long
def test_the_command_reads_a_pipe_to_its_end(tmp_path: Path) -> None:
    done = run(
        "task=chat",
        "device=cpu",
        *DECODE,
        f"hydra.run.dir={tmp_path / 'run'}",
        stdin="Who?\n\n//reset\n/exit\nNot said\n",
    )
    first = expected([{"role": "user", "content": "Who?"}])
    turns = [("user", "Who?"), ("assistant", first), ("user", "/reset")]
    second = expected([{"role": role, "content": content} for role, content in turns])
    assert (done.returncode, done.stdout) == (0, f"{first}\n{second}\n"), done.stderr
    assert (tmp_path / "run" / "config.yaml").is_file()


@pytest.mark.long
@each(
    ("arguments", "message"),
    [
        (["decode=sampling", "decode.n=2"], "decode.n=2 is not used by task=chat"),
        (["chat.url=localhost:8000"], "chat.url='localhost:8000' .* an address that begins with http:// or https://"),
        (["chat.model=x"], "chat.model=x .* chat.url=ADDRESS too"),
        (["chat.port=1"], "chat.port=1 .* 7860, or give chat.web=true"),
        (
            ["chat.url=http://127.0.0.1:1/v1"],
            r"chat.url=http://127.0.0.1:1/v1 cannot be reached \(.*refused.*\): give the address",
        ),
        (["chat.url=http://127.0.0.1:1/v1", "quant=int8"], "quant, device, parallel and adapters are not used with"),
        (["chat.url=http://127.0.0.1:1/v1", "parallel=tp", "parallel.tp=2"], "parallel and adapters are not used with"),
        (
            ["chat.url=http://127.0.0.1:1/v1", "decode=beam"],
            "decode.num_beams=4 is not used with chat.url: leave it out",
        ),
    ],
)
def test_options_that_cannot_be_a_conversation_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert re.search(message, refusal(tmp_path / "run", "task=chat", *arguments))


def answered(endpoint: Endpoint, messages: list[Message]) -> tuple[str, list[str]]:
    pieces: list[str] = []
    with interruption() as signals:
        return endpoint.answer(messages, pieces.append, signals), pieces


def test_a_servers_answer_is_streamed_and_its_reasoning_not_kept(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.lines = [
        ": keep-alive",
        chunk(role="assistant"),
        chunk(reasoning_content="Hm. "),
        chunk(content="你"),
        "",
        chunk(content="好"),
    ]
    server.lines += ['data: {"choices": [], "usage": {}}', "data: [DONE]", "data: never read"]
    endpoint = Endpoint(server.url + "/", "second", DecodeConfig(temperature=0.0, stop=["\n"], max_new_tokens=9))
    messages = [{"role": "user", "content": "Hi"}]
    assert answered(endpoint, messages) == ("你好", ["Hm. ", "你", "好"])
    asked = {
        "model": "second",
        "messages": messages,
        "stream": True,
        "max_tokens": 9,
        "temperature": 0.0,
        "stop": ["\n"],
    }
    assert (server.asked, server.keys) == ([asked], ["Bearer secret"])


@each(
    ("status", "line", "message"),
    [
        (401, '{"error": {"message": "no such key"}}', "the server answers 401: no such key"),
        (502, "<html>", "the server answers 502: <html>"),
        (200, 'data: {"error": {"message": "the engine died"}}', "the server says: the engine died"),
        (200, "data: [1]", "does not answer as OpenAI's API does: give its address with /v1"),
        (200, 'data: {"choices": [5]}', "does not answer as OpenAI's API does"),
        (307, "elsewhere", "the server answers 307: elsewhere"),
        (200, "", "does not answer as OpenAI's API does"),
        (200, '{"choices": [{"message": {"content": "plain JSON"}}]}', "does not answer as OpenAI's API does"),
    ],
)
def test_an_error_of_the_server_is_one_line(server: ChatServer, status: int, line: str, message: str) -> None:
    server.status, server.lines = status, [line]
    server.content_type = "application/json" if "plain JSON" in line else server.content_type
    with pytest.raises(UserError, match=message):
        answered(Endpoint(server.url, None, DecodeConfig()), [{"role": "user", "content": "Hi"}])


def test_lines_of_a_stream_end_as_the_standard_says(server: ChatServer) -> None:
    """In any parts. Texts may contain other characters that Python treats as line ends. A null error is not an
    error."""
    text = "a\u2028b\u2029c\u0085d\x0be"
    event = {"choices": [{"delta": {"content": text}}], "error": None}
    server.lines = [f"data: {json.dumps(event, ensure_ascii=False)}\r", "\rdata: [DONE]"]
    assert answered(Endpoint(server.url, None, DecodeConfig()), [{"role": "user", "content": "Hi"}]) == (text, [text])
    content = "eins\r\nzwei\rdrei\n\n\u2028vier\r\r\n\x85\n".encode()
    expected = ["eins", "zwei", "drei", "", "\u2028vier", "", "\x85"]
    for size in range(1, len(content)):
        lines = EventLines()
        parts = [content[i : i + size] for i in range(0, len(content), size)]
        assert [line for part in parts for line in lines.feed(part)] == expected


@each("key", ["secret\n", "sec\r\nret", "sécret", "\x00secret"])
def test_a_key_that_no_header_takes_is_not_shown(
    key: str, server: ChatServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key.replace("\x00", "\x01"))
    with pytest.raises(
        UserError, match="OPENAI_API_KEY has a line break, or a character that no header takes"
    ) as caught:
        Endpoint(server.url, None, DecodeConfig())
    assert "ret" not in str(caught.value)


def test_the_runs_own_server_is_asked_without_a_proxy(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert Endpoint(server.url, None, DecodeConfig(), is_own=True).models == ["first", "second"]
    with pytest.raises(UserError, match="cannot be reached"):
        Endpoint(server.url, None, DecodeConfig())


def test_a_server_without_the_model_is_refused(server: ChatServer) -> None:
    with pytest.raises(UserError, match="chat.model=third is none of the server's: .*first, second"):
        Endpoint(server.url, "third", DecodeConfig())
    server.models = []
    with pytest.raises(UserError, match="lists no model"):
        Endpoint(server.url, None, DecodeConfig())


def test_only_what_is_given_is_asked_for() -> None:
    assert asked_for(DecodeConfig()) == {}
    assert asked_for(DecodeConfig(max_new_tokens="auto", num_beams=1, top_k=0)) == {}
    assert asked_for(DecodeConfig(top_k=5, seed=0, presence_penalty=0.5)) == {
        "top_k": 5,
        "seed": 0,
        "presence_penalty": 0.5,
    }
    with pytest.raises(UserError, match="decode.no_repeat_ngram_size=3 is not used with chat.url: leave it out"):
        asked_for(DecodeConfig(no_repeat_ngram_size=3))
