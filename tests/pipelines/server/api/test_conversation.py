"""Conversations of requests: prompts, parsed answers, and guides for tool calls."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import ModelConfig
from conf.serving import ServeConfig
from conf.thinking import ThinkingConfig
from models.tokenizers import Tokenizer
from pipelines.server.api.answers import TokenTexts
from pipelines.server.api.chat_format import unnamed_literals
from pipelines.server.api.conversation import LONG_TEXT, Chat
from pipelines.server.api.errors import ApiError
from pipelines.server.api.message_reader import add_delta
from pipelines.server.api.message_requests import NAMES as MESSAGES_NAMES
from pipelines.server.api.parsing import parse_request
from pipelines.server.api.requests import ChatRequest
from pipelines.server.api.response_requests import NAMES as RESPONSES_NAMES
from pipelines.server.api.writers import num_reasoning_tokens
from tests.helpers.cases import each
from tests.helpers.chat_styles import ARGUMENTS, CALLS, STYLES, WEATHER, chat_of
from tests.helpers.fork_server import true_starts
from tests.helpers.small_tokenizers import byte_level, save

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
]

USER = {"role": "user", "content": "Hi"}
LONG = {"role": "user", "content": "a " * (LONG_TEXT // 2 + 1)}

ONE_CALL = {
    "chatml": '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": ARGUMENTS}',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>ARGUMENTS"
    "<|tool_call_end|><|tool_calls_section_end|>",
}


def request(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [USER]} | fields
    return parse_request(ChatRequest, json.dumps(body).encode())


def refused(chat: Chat, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        chat.prompt(request(**fields))
    assert raised.value.status == 400
    return raised.value


def read(chat: Chat, text: str, size: int = 1, **fields: Any) -> dict[str, Any]:
    """Return the message for an answer that arrives in pieces of `size` letters."""
    reader = chat.prompt(request(**fields)).reader()
    message: dict[str, Any] = {}
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for delta in [delta for piece in pieces for delta in reader.read(piece)] + reader.end():
        add_delta(message, delta)
    return message


def matches(tokenizer: Tokenizer, lark: str, text: str, special: tuple[str, ...] = ()) -> bool:
    """Return whether a text matches a grammar over bytes and special tokens."""

    class Bytes:
        eos_token_id, bos_token_id = 256, None
        tokens = [bytes([i]) for i in range(256)] + [b"<eos>"] * (tokenizer.size - 256)
        special_token_ids = list(range(256, tokenizer.size))

        def __call__(self, text: bytes) -> list[int]:
            raise NotImplementedError

    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(Bytes())), json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while text:
        name = next((name for name in special if text.startswith(name)), text[0])
        ids += [tokenizer.special_token_id(name)] if name in special else name.encode()  # type: ignore[list-item]
        text = text[len(name) :]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.long
@each("style", STYLES)
def test_tools_are_told_and_calls_are_read(style: str, tmp_path: Path) -> None:
    chat, tokenizer = chat_of(tmp_path, style)
    prompt = chat.prompt(request(tools=TOOLS))
    assert prompt.token_ids == tokenizer.encode_messages([{"role": "user", "content": "Hi"}], None, tools=TOOLS)[1]
    for size in (1, 7, 1000):
        message = read(chat, CALLS[style], size, tools=TOOLS)
        functions = [call["function"] for call in message["tool_calls"]]
        assert functions[0] == {"name": "weather", "arguments": ARGUMENTS}
        assert functions[1:] == ([] if style in ("llama3", "glm4") else [{"name": "clock", "arguments": "{}"}])
        assert [call["index"] for call in message["tool_calls"]] == list(range(len(functions)))
        assert "content" not in message
    content = CALLS[style].replace("[TOOL_CALLS]", "")  # a special token that means nothing without tools
    assert read(chat, CALLS[style], tools=TOOLS, tool_choice="none")["content"].strip() == content.strip()
    end = "</s>" * (not prompt.settings.get("skip_special_tokens", True))  # the token that ends an answer
    assert read(chat, f"Fine.{end}", tools=TOOLS) == {"content": "Fine."}
    stops = [id for text in ("<|user|>", "<|observation|>") if (id := tokenizer.special_token_id(text))]
    keeps = {"skip_special_tokens": False} if style in ("llama3", "mistral") else {}
    assert prompt.settings == keeps | ({"stop_token_ids": stops} if style == "glm4" else {})


def test_ids_of_calls_are_the_same_for_the_same_request(tmp_path: Path) -> None:
    chat, _ = chat_of(tmp_path, "chatml")

    def ids(n: int) -> list[str]:
        prompt = chat.prompt(request(tools=TOOLS))
        readers = [prompt.reader() for _ in range(n)]
        deltas = [delta for reader in readers for delta in reader.read(CALLS["chatml"]) + reader.end()]
        return [call["id"] for delta in deltas for call in delta.get("tool_calls", []) if "id" in call]

    assert ids(2) == ids(2)
    assert len(set(ids(2))) == 4
    assert all(len(id) == 9 and id.isalnum() for id in ids(1))  # the form that Mistral's templates accept


def test_ids_that_a_model_writes_come_back_to_it(tmp_path: Path) -> None:
    """Kimi's templates repeat them, and the model continues the numbering."""
    chat, tokenizer = chat_of(tmp_path, "kimi")
    calls = read(chat, CALLS["kimi"], tools=TOOLS)["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.weather:0", "functions.clock:12"]
    call = {key: value for key, value in calls[1].items() if key != "index"}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": calls[1]["id"], "content": "noon"}
    messages = [{"role": "user", "content": "Hi"}, answer, result]
    text = tokenizer.decode(chat.prompt(request(messages=messages, tools=TOOLS)).token_ids, False)
    begin, _, behind = CALLS["kimi"].partition("<|tool_call_begin|>functions.weather")
    second = behind.partition("<|tool_call_end|>")[2]
    assert f"<|im_assistant|>assistant<|im_middle|>{begin}{second}<|im_end|>" in text
    assert text.endswith("## Return of functions.clock:12\nnoon<|im_end|><|im_assistant|>assistant<|im_middle|>")


@pytest.mark.long
@each("style", STYLES)
@each("choice", ["required", "named"])
def test_calls_can_be_required(style: str, choice: str, tmp_path: Path) -> None:
    chat, tokenizer = chat_of(tmp_path, style)
    named = {"type": "function", "function": {"name": "weather"}}
    prompt = chat.prompt(request(tools=TOOLS, tool_choice=named if choice == "named" else choice))
    lark = prompt.settings["guide"]["lark"]
    DecodeConfig(guide={"lark": lark})  # the engine's output for it
    special = tuple(name for name in STYLES[style][1] if name == "[TOOL_CALLS]")
    calls = CALLS[style].replace("clock:12", "clock:1")  # the grammar has the exact number
    one = style in ("llama3", "glm4")
    assert matches(tokenizer, lark, calls, special) is (choice == "required" or one)
    assert (style == "kimi") is not matches(tokenizer, lark, CALLS[style], special) or choice == "named"
    assert not matches(tokenizer, lark, calls.replace("city", "town"), special)
    assert not matches(tokenizer, lark, "Fine.", special)


@each("style", ["chatml", "llama3", "mistral", "deepseek", "kimi"])
def test_strict_tools_hold_where_calls_are_free(style: str, tmp_path: Path) -> None:
    chat, tokenizer = chat_of(tmp_path, style)
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    lark = chat.prompt(request(tools=strict)).settings["guide"]["lark"]
    special = tuple(name for name in STYLES[style][1] if name == "[TOOL_CALLS]")
    said = "" if style == "llama3" else "Well: "
    assert matches(tokenizer, lark, "Fine < [ fine.", special)
    calls = CALLS[style].replace("clock:12", "clock:1")
    assert matches(tokenizer, lark, said + calls, special)
    assert not matches(tokenizer, lark, said + calls.replace("city", "town"), special)
    single = chat.prompt(request(tools=strict, parallel_tool_calls=False)).settings["guide"]["lark"]
    assert matches(tokenizer, single, said + calls, special) is (style == "llama3")
    one = read(chat, CALLS[style], tools=TOOLS, parallel_tool_calls=False)  # without a grammar, others are dropped
    assert [call["function"]["name"] for call in one["tool_calls"]] == ["weather"]


@each("style", ["chatml", "llama3", "kimi"], quick=["chatml"])
def test_references_in_the_parameters_of_a_tool(style: str, tmp_path: Path) -> None:
    """Each refers to the tool's own schema: to a definition, to an anchor, and to the whole."""
    chat, tokenizer = chat_of(tmp_path, style)
    leaf = {
        "type": "object",
        "properties": {"v": {"type": "integer"}},
        "required": ["v"],
        "additionalProperties": False,
    }
    for reference, definition in (("#/$defs/a", leaf), ("#there", {**leaf, "$anchor": "there"}), ("#", leaf)):
        child = {"type": "array", "items": {"$ref": reference}}
        parameters = {"$defs": {"a": definition}, **leaf, "properties": {**leaf["properties"], "c": child}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        lark = chat.prompt(request(tools=tools, tool_choice="required")).settings["guide"]["lark"]
        for arguments, is_right in (
            ('{"v": 1, "c": [{"v": 2}]}', True),
            ('{"v": 1, "c": [{"v": 2, "c": []}]}', reference == "#"),
            ('{"v": 1, "c": [{"v": "2"}]}', False),
            ('{"v": 1, "c": [{"name": "f"}]}', False),
        ):
            call = ONE_CALL[style].replace("ARGUMENTS", arguments)
            assert matches(tokenizer, lark, call) == is_right, (reference, call)


def test_arguments_of_a_call_are_an_object(tmp_path: Path) -> None:
    chat, tokenizer = chat_of(tmp_path, "chatml")

    def required(parameters: Any) -> dict[str, Any]:
        tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": parameters}}]
        return {"tools": tools, "tool_choice": "required"}

    for parameters in ({"anyOf": [{"type": "string"}, {"required": ["a"]}]}, {"type": ["object", "null"]}, {}):
        lark = chat.prompt(request(**required(parameters))).settings["guide"]["lark"]
        assert matches(tokenizer, lark, ONE_CALL["chatml"].replace("ARGUMENTS", '{"a": 1}')) == bool(parameters)
        assert not any(
            matches(tokenizer, lark, ONE_CALL["chatml"].replace("ARGUMENTS", text)) for text in ('"a"', "null", "[]")
        )
    for wrong, param in (({"type": "string"}, ".type"), ({"type": ["array"]}, ".type"), ({"enum": [2**53 + 1]}, "")):
        assert refused(chat, **required(wrong)).param == f"tools[1].function.parameters{param}"
        assert chat.prompt(request(**required(wrong) | {"tool_choice": "auto"})).token_ids  # nothing is enforced
        named = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
        error = refused(chat, **required(wrong) | named)
        assert error.param == f"tools[1].function.parameters{param}"
        assert error.renamed(MESSAGES_NAMES).param == f"tools[1].input_schema{param}"
        assert "tools[1].parameters" in error.renamed(RESPONSES_NAMES).message
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 2**70 + 1}}}
    assert "const 1180591620717411303425, which" in refused(chat, response_format=form).message


def test_reasoning_that_the_prompt_begins(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}<tool_call>{{ tools }}<think>\n")
    chat, tokenizer = chat_of(tmp_path / "model", "chatml", chat_template=str(template))
    text = "hm\n</think>\n\nFine"
    assert read(chat, text) == {"reasoning_content": "hm", "content": "Fine"}
    lark = chat.prompt(request(tools=TOOLS, tool_choice="required")).settings["guide"]["lark"]
    assert matches(tokenizer, lark, f"hm </think>\n\n{CALLS['chatml']}")
    assert matches(tokenizer, lark, CALLS["chatml"])  # a call at a line's beginning ends the reasoning
    assert not matches(tokenizer, lark, CALLS["chatml"].replace("city", "town"))
    assert not matches(tokenizer, lark, f"hm {ONE_CALL['chatml'].replace('f', 'clock').replace('ARGUMENTS', '{}')}")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
    lark = chat.prompt(request(response_format=form)).settings["guide"]["lark"]
    assert matches(tokenizer, lark, f"hm</think>\n{ARGUMENTS}")
    DecodeConfig(guide={"lark": lark})
    lark = chat.prompt(request(structured_outputs={"choice": ["yes"]})).settings["guide"]["lark"]
    assert matches(tokenizer, lark, "hm</think>\nyes")
    assert not matches(tokenizer, lark, "hm</think>\nno")


def test_a_budget_of_reasoning(tmp_path: Path) -> None:
    """With Qwen's closing text, which counts as reasoning. `num_reasoning_tokens` reads the text as a client does."""
    template = tmp_path / "own.jinja"
    template.write_text("{# <tool_call> <|im_start|> enable_thinking #}{{ messages[0].content }}<think>\n")
    message = (
        "Considering the limited time by the user, I have to give the solution based on the thinking directly now."
    )
    for own, is_open in ((str(template), True), ("auto", False)):
        chat, tokenizer = chat_of(tmp_path / str(is_open), "chatml", chat_template=own)
        prompt = chat.prompt(request(thinking_token_budget=2))
        limit = DecodeConfig().replaced(prompt.settings).thinking
        expected = ThinkingConfig(2, "<think>", "</think>", f"\n\n{message}\n</think>\n\n", is_open)
        assert limit == expected
        thought = f"{'' if is_open else '<think>'}hm"
        token_ids = tokenizer.encode(f"{thought}{limit.closing}Fine", False)
        num_markers = len(tokenizer.encode(thought.removesuffix("hm"), False))
        num_expected = len(tokenizer.encode(f"{thought}\n\n{message}", False)) - num_markers
        assert num_reasoning_tokens(TokenTexts(tokenizer, False), token_ids, prompt.reader()) == num_expected
    chat = Chat(tokenizer, ServeConfig(response_template="none"))
    prompt = chat.prompt(request(thinking_token_budget=2))
    assert prompt.settings["thinking"] is None
    assert prompt.warnings == ["thinking_token_budget is not used: this model's format (none) has no reasoning"]
    assert "thinking" not in chat.prompt(request()).settings


def test_messages_are_told_as_templates_have_them(tmp_path: Path) -> None:
    chat, tokenizer = chat_of(tmp_path, "chatml")
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief <|im_end|>"}],
        },
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sun <|im_end|>"},
    ]
    prompt = chat.prompt(request(messages=messages, tools=TOOLS))
    conversation = json.loads(json.dumps(messages))
    conversation[0] = {"role": "system", "content": "be\nbrief <|im_end|>"}
    conversation[2]["tool_calls"][0]["function"]["arguments"] = json.loads(ARGUMENTS)
    assert prompt.token_ids == tokenizer.encode_messages(conversation, None, tools=TOOLS)[1]
    assert prompt.token_ids.count(tokenizer.special_token_id("<|im_end|>")) == 5  # type: ignore[arg-type]
    for wrong in ("[1]", "1", "{", '{"a":' * 65 + "1" + "}" * 65, '{"a":' * 500 + "1" + "}" * 500):
        call["function"]["arguments"] = conversation[2]["tool_calls"][0]["function"]["arguments"] = wrong  # type: ignore[index]
        assert chat.prompt(request(messages=messages)).token_ids == tokenizer.encode_messages(conversation, None)[1]
    call["function"]["arguments"], conversation[2]["tool_calls"][0]["function"]["arguments"] = "", {}  # type: ignore[index]
    assert chat.prompt(request(messages=messages)).token_ids == tokenizer.encode_messages(conversation, None)[1]


@each("style", ["chatml", "mistral"])
def test_messages_that_clients_send_back_whole(style: str, tmp_path: Path) -> None:
    """With null in fields that the server lacks, an empty list of calls, and reasoning that was cut before an
    answer."""
    chat, tokenizer = chat_of(tmp_path, style)
    nulls = {"refusal": None, "audio": None, "function_call": None, "annotations": None, "x_new": None}
    begun = [{"role": "user", "content": "Hi"}]
    for empty in ({"tool_calls": []}, {"tool_calls": None}, {"annotations": []}):
        messages = [*begun, {"role": "assistant", "content": "Yes.", **nulls, **empty}, *begun]
        plain = [*begun, {"role": "assistant", "content": "Yes."}, *begun]
        assert chat.prompt(request(messages=messages)).token_ids == tokenizer.encode_messages(plain, None)[1]
    cut = [*begun, {"role": "assistant", "content": None, "reasoning_content": "hm"}, *begun]
    plain = [*begun, {"role": "assistant", "content": "", "reasoning_content": "hm"}, *begun]
    assert chat.prompt(request(messages=cut)).token_ids == tokenizer.encode_messages(plain, None)[1]
    assert refused(chat, messages=[{"role": "user", "content": "Hi", "audio": {}}]).param == "messages[0].audio"


def check_system_turns(tokenizer: Tokenizer, folder: Path) -> None:
    """A template rejects, omits or takes system messages: one, a second one, and one after an answer."""
    rejecting = "{%- if m.role == 'system' and not loop.first %}{{- raise_exception('system first') }}{%- endif %}"
    no_system = "{%- if m.role == 'system' %}{{- raise_exception('no system') }}{%- endif %}"
    alternating = (
        "{%- if loop.previtem is defined and loop.previtem.role == m.role %}{{- raise_exception('twice') }}{%- endif %}"
    )
    omitting = "{%- if m.role == 'system' and not loop.first %}{%- continue %}{%- endif %}"
    last_wins = (
        "{%- if m.role == 'system' and not loop.last and loop.nextitem.role == 'system' %}{%- continue %}{%- endif %}"
    )
    roles = ("system", "developer", "user", "assistant", "developer", "user", "system")
    messages = [{"role": role, "content": content} for role, content in zip(roles, "abcdefg", strict=True)]
    moved = "[system:a\n\nb][user:c][assistant:d][user:e\n\nf\n\ng]"
    expected = {
        "": "[system:a][system:b][user:c][assistant:d][system:e][user:f][system:g]",
        rejecting + alternating: moved,
        no_system: "[user:a\n\nb\n\nc][assistant:d][user:e\n\nf\n\ng]",
        omitting: moved,
        last_wins: "[system:a\n\nb][user:c][assistant:d][system:e][user:f][system:g]",
    }
    for number, (checks, text) in enumerate(expected.items()):
        file = folder / f"systems{number}.jinja"
        file.write_text("{%- for m in messages %}" + checks + "[{{ m.role }}:{{ m.content }}]{%- endfor %}")
        chat = Chat(tokenizer, ServeConfig(chat_template=str(file)))
        prompt = chat.prompt(request(messages=messages))
        assert (prompt.text, bool(prompt.warnings)) == (text, number > 0)
        assert chat.prompt(request()).warnings == []


def check_begun_answers(chat: Chat) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The "}]
    prompt = chat.prompt(request(messages=begun, continue_final_message=True))
    assert prompt.text.endswith("<|im_start|>assistant\nThe ")
    assert prompt.reader().read("end") == [{"content": "end"}]
    thought = [begun[0], {"role": "assistant", "content": "<think>Hm"}]
    reader = chat.prompt(request(messages=thought, continue_final_message=True)).reader()
    assert reader.read("so</think>x y") + reader.end() == [{"reasoning_content": "so"}, {"content": "x y"}]
    assert chat.prompt(request(messages=begun, add_generation_prompt=False)).text.endswith("The <|im_end|>\n")
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    called = [begun[0], {"role": "assistant", "tool_calls": calls}]
    assert refused(chat, messages=called, continue_final_message=True).param == "messages"


def test_arguments_of_the_template(tmp_path: Path) -> None:
    chat, tokenizer = chat_of(tmp_path, "chatml")
    prompt = chat.prompt(request(chat_template_kwargs={"enable_thinking": False}))
    text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert prompt.reader().read("x y") == [{"content": "x y"}]
    error = refused(chat, chat_template_kwargs={"thinking": False})
    assert error.param == "chat_template_kwargs.thinking"
    assert "'thinking' is not an argument of the chat template, which has enable_thinking" in error.message
    for effort, warnings in (
        ("none", []),
        ("low", ["reasoning_effort=low only turns reasoning on: the chat template has no levels"]),
    ):
        prompt = chat.prompt(request(reasoning_effort=effort))
        assert (prompt.text.endswith("</think>\n\n"), prompt.warnings) == (effort == "none", warnings)
    check_begun_answers(chat)
    check_system_turns(tokenizer, tmp_path)
    levels = tmp_path / "levels.jinja"
    levels.write_text("{{- messages[0].content }}")
    plain = Chat(tokenizer, ServeConfig(chat_template=str(levels)))
    unused = ["reasoning_effort=max is not used: the chat template has no argument for it"]
    assert plain.prompt(request(reasoning_effort="max")).warnings == unused
    levels.write_text(
        "{%- if reasoning_effort is defined and reasoning_effort not in ('none', 'low', 'high') %}"
        "{{- raise_exception('none, low or high') }}{%- endif %}{{- reasoning_effort }}{{- messages[0].content }}"
    )
    chat = Chat(tokenizer, ServeConfig(chat_template=str(levels)))
    for effort, level in (("none", "none"), ("minimal", "low"), ("medium", "high"), ("max", "high"), ("low", "low")):
        prompt = chat.prompt(request(reasoning_effort=effort))
        changed = [] if effort == level else [f"reasoning_effort={effort} becomes {level} for the chat template"]
        assert (prompt.text, prompt.warnings) == (f"{level}Hi", changed)
    levels.write_text("{{- raise_exception(reasoning_effort or 'no effort') }}")
    chat = Chat(tokenizer, ServeConfig(chat_template=str(levels)))
    assert "does not take these messages: no effort" in refused(chat, reasoning_effort="max").message


def test_calls_whose_markers_are_special_tokens_are_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm!25281: the engine must keep these tokens in the text. A response_template of transformers is a hint."""
    template, special, added = STYLES["chatml"]
    monkeypatch.setitem(STYLES, "chatml", (template, [*special, *added[:2]], added[2:]))
    chat, _ = chat_of(tmp_path, "chatml")
    assert chat.prompt(request(tools=TOOLS)).settings == {"skip_special_tokens": False}
    assert [call["function"]["name"] for call in read(chat, CALLS["chatml"], tools=TOOLS)["tool_calls"]] == [
        "weather",
        "clock",
    ]
    form = chat.format.form
    assert unnamed_literals({"response_template": {"a": r"\<think\>(.*)", "b": "<tool_call>"}}, form) == []
    assert unnamed_literals({"response_schema": {"x-regex": "<think>"}}, form) == ["<tool_call>"]
    assert unnamed_literals({"response_template": None}, form) == []


def test_calls_that_a_template_omits_are_written_with_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Granite 3.3. A marker that an argument spells stays text."""
    template = "{% for m in messages %}<|r|>{{ m.role }}<|e|>{{ m.content }}{% endfor %}{{ tools }}{{ '' and '<|tool_call|>' }}"
    monkeypatch.setitem(STYLES, "chatml", (template, ["<|r|>", "<|e|>", "<|tool_call|>"], []))
    chat, tokenizer = chat_of(tmp_path, "chatml")
    assert (chat.format.name, chat.format.origin) == ("granite3", "entry")
    function = {"name": "weather", "arguments": '{"city": "a<|tool_call|>b"}'}
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    prompt = chat.prompt(
        request(messages=[USER, answer, {"role": "tool", "tool_call_id": "a", "content": "sun"}], tools=TOOLS)
    )
    assert '<|tool_call|>[{"name": "weather", "arguments": {"city": "a<|tool_call|>b"}}]' in prompt.text
    assert prompt.token_ids.count(tokenizer.special_token_id("<|tool_call|>")) == 1  # type: ignore[arg-type]


def test_models_whose_calls_cannot_be_read_or_told(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    chat = Chat.open(ModelConfig(path="x", tokenizer=str(tmp_path)), ServeConfig())
    assert (refused(chat, tools=TOOLS).param, chat.prompt(request()).settings) == ("tools", {})
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}{{ tools }}")
    chat = Chat.open(ModelConfig(path="x", tokenizer=str(tmp_path)), ServeConfig())
    assert "(the calls that its chat template writes cannot be read back): leave" in refused(chat, tools=TOOLS).message
    error = refused(chat, add_special_tokens=True)
    assert (error.param, "the chat template writes these tokens" in error.message) == ("add_special_tokens", True)
    assert chat.prompt(request(tools=TOOLS, tool_choice="none")).settings == {}
    chat = Chat.open(ModelConfig(path="x", tokenizer=str(tmp_path)), ServeConfig(response_template="hermes"))
    assert "tool_calls" in read(chat, CALLS["chatml"], tools=TOOLS)
    chat = Chat.open(ModelConfig(path="x", tokenizer=None), ServeConfig())
    assert "this server has model.tokenizer=null" in refused(chat).message
    chat = Chat.open(ModelConfig(path="x", tokenizer=str(tmp_path)), ServeConfig(chat_template="none"))
    assert "this server has serve.chat_template=none" in refused(chat).message
    with pytest.raises(
        UserError, match=r"serve.chat_template=/nowhere cannot be read .*: give auto, none or a Jinja file"
    ):
        Chat.open(ModelConfig(path="x", tokenizer=str(tmp_path)), ServeConfig(chat_template="/nowhere"))
    with pytest.raises(
        UserError, match="serve.response_template='qwen' is not allowed: give auto, a YAML file, or one"
    ):
        Chat.open(ModelConfig(path="x", tokenizer=str(tmp_path)), ServeConfig(response_template="qwen"))


def test_short_texts_do_not_wait_for_long_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, tokenizer = chat_of(tmp_path, "chatml")
    encode, may_go_on = type(tokenizer).encode, threading.Event()

    def blocking(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > LONG_TEXT:
            assert may_go_on.wait(60.0)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(type(tokenizer), "encode", blocking)

    async def test() -> None:
        long = [asyncio.create_task(chat.encode(request(messages=[LONG]))) for _ in range(3)]
        assert (await chat.encode(request())).token_ids
        assert await chat.in_thread(1, tokenizer.encode, "a", True)
        assert not any(task.done() for task in long)
        may_go_on.set()
        assert all((await asyncio.gather(*long))[0].token_ids)

    asyncio.run(test())
    chat.close()


def test_long_texts_of_users_are_refused_before_a_template_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, tokenizer = chat_of(tmp_path, "chatml")
    assert tokenizer.max_token_bytes
    most = 9 * tokenizer.max_token_bytes
    reasoning = {"role": "assistant", "content": "a", "reasoning_content": "b" * 2 * most}  # templates omit it
    assert chat.prompt(request(messages=[USER, reasoning, USER]), most).token_ids
    monkeypatch.setattr(tokenizer._templates, "render", None)
    for messages in ([{**USER, "content": "a" * (most + 1)}], [{**USER, "content": "a" * (most // 2 + 1)}] * 2):
        with pytest.raises(ApiError, match="the prompt has at least 10 tokens"):
            chat.prompt(request(messages=messages), 9)


@true_starts()
def test_encoding_in_threads_and_without_torch(tmp_path: Path) -> None:
    chat, _ = chat_of(tmp_path, "chatml")

    async def encode() -> list[list[int]]:
        prompts = await asyncio.gather(*(chat.encode(request()) for _ in range(5)))
        return [prompt.token_ids for prompt in prompts]

    assert asyncio.run(encode()) == [chat.prompt(request()).token_ids] * 5
    chat.close()
    code = (
        "import sys\nfrom pathlib import Path\nfrom conf.schema import ModelConfig\nfrom conf.serving import ServeConfig\n"
        "from pipelines.server.api.conversation import Chat\n"
        "import models.formats.gguf.header, models.formats.gguf.tokenizer\n"
        "assert Chat.open(ModelConfig(path='models/tiny'), ServeConfig()).tokenizer\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
