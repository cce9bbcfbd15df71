"""Requests through the engine's process: the results of predict; the end of the process, and its restart."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig, Task
from conf.serving import ServeConfig
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from pipelines.replicas.engine_process import child as module
from pipelines.replicas.engine_process.child import COMMAND, LocalChild
from pipelines.replicas.engine_process.client import EngineClient, EngineGone, EngineRefused
from pipelines.replicas.engine_process.frames import Accepted, Cancel, Delta, Submit, encode
from pipelines.replicas.engine_process.suspects import MAX_CRASHES, digest_of
from tests.helpers.builders import REPOSITORY, run_config, said
from tests.helpers.cases import each
from tests.helpers.fake_engine import READY
from tests.helpers.fork_server import true_starts
from tests.helpers.serving import Asked, Whole, idle, run_async, serving, tiny_run, whole
from tests.helpers.waiting import LIMIT_S

ENDLESS = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_new_tokens": 40},
    {"temperature": 0.9, "n": 2, "seed": 11, "max_new_tokens": 30},
    {"temperature": 0.0, "max_new_tokens": 60, "stop": [" the", "."]},
    {"temperature": 0.7, "seed": 4, "logprobs": 2, "max_new_tokens": 20},
]
TEXTS = ["Once upon a time", "Tom had a red ball.", "What is 3 + 4?", "小猫"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(tiny_run(), 4)


def prompt_of(engine: Engine, text: str = TEXTS[0]) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text, True)


def pid_of(client: EngineClient) -> int:
    assert isinstance(client._child, LocalChild)
    return client._child.pid


async def first_token(answer: Asked) -> None:
    async for item in answer:
        if isinstance(item, Delta):
            return


async def ended(answer: Asked) -> Any:
    """Return the exception that ends an answer."""
    try:
        async for _ in answer:
            pass
    except (EngineGone, EngineRefused) as error:
        return error
    return None


@pytest.mark.long
def test_sixteen_at_once_are_what_each_is_alone(engine: Engine) -> None:
    cases = [(TEXTS[i % 4], SETTINGS[i // 4], i % 3 > 0) for i in range(16)]

    async def test() -> list[Whole]:
        async with serving() as client:
            submits = [Submit(0, prompt_of(engine, text), decode, streams=streams) for text, decode, streams in cases]
            answers = await asyncio.gather(*(whole(Asked(client, submit)) for submit in submits))
            beat = await idle(client)
            assert beat.num_generated_tokens == sum(len(ids) for one in answers for ids in one.token_ids)
            assert beat.cache_usage == 0
            return answers

    for (text, decode, streams), answer in zip(cases, run_async(test()), strict=True):
        (output,) = engine.generate([engine.request(0, prompt_of(engine, text), DecodeConfig(**decode))])
        assert answer.token_ids == [one.token_ids for one in output.completions]
        assert answer.texts == [one.text for one in output.completions]
        assert [answer.samples[i].stop_reason for i in range(len(answer.samples))] == [
            one.stop_reason for one in output.completions
        ]
        for sample, one in zip(answer.samples.values(), output.completions, strict=True):
            assert [entry.logprob for entry in sample.logprobs] == [
                step.logprobs[token] for token, step in zip(one.token_ids, one.logprobs or [], strict=False)
            ]
            assert streams or sample.num_deltas == 1


@pytest.mark.long
def test_a_request_that_is_left_ends_at_once(engine: Engine) -> None:
    async def test() -> None:
        async with serving() as client:
            left = Asked(client, Submit(0, prompt_of(engine), ENDLESS, streams=True))
            stays = Asked(client, Submit(0, prompt_of(engine), SETTINGS[0]))
            await first_token(left)
            left.cancel()
            left.cancel()
            assert await ended(left) is None
            assert (await whole(stays)).done.error is None
            beat = await idle(client)
            assert beat.num_generated_tokens < 400
            assert beat.cache_usage == 0

    run_async(test())


@pytest.mark.long
def test_deltas_of_a_client_that_reads_late_are_one(engine: Engine) -> None:
    async def test() -> list[Whole]:
        async with serving() as client:
            submit = Submit(0, prompt_of(engine), SETTINGS[1], streams=True)
            late = Asked(client, submit)
            others = [await whole(Asked(client, submit))]
            await idle(client)
            return [await whole(late), *others]

    late, read = run_async(test())
    assert (late.texts, late.token_ids) == (read.texts, read.token_ids)
    assert [sample.num_deltas for sample in late.samples.values()] == [1, 1]


@pytest.mark.long
def test_a_killed_engine_comes_back_and_says_the_same(engine: Engine) -> None:
    submits = [Submit(0, prompt_of(engine, TEXTS[i % 4]), ENDLESS | {"seed": i}, streams=True) for i in range(8)]

    async def test() -> None:
        async with serving() as client:
            before = await asyncio.gather(*(whole(Asked(client, submit)) for submit in submits))
            fingerprint = client.info and client.info.fingerprint
            running = [Asked(client, submit) for submit in submits]
            await asyncio.gather(*map(first_token, running))
            os.kill(pid_of(client), signal.SIGKILL)
            for answer in running:
                assert "was ended by SIGKILL: send the request again" in str(await ended(answer))
            assert client.beat is None
            with pytest.raises(EngineGone, match="is loading its model"):
                Asked(client, submits[0])
            info = await client.wait_ready()
            assert (info.fingerprint, client.num_restarts) == (fingerprint, 1)
            assert (info.fingerprint or "").startswith("fp_")
            after = await asyncio.gather(*(whole(Asked(client, submit)) for submit in submits))
            assert [answer.texts for answer in after] == [answer.texts for answer in before]
            assert [answer.token_ids for answer in after] == [answer.token_ids for answer in before]

    run_async(test())


@pytest.mark.long
def test_a_stopped_engine_is_ended_and_started_again(engine: Engine) -> None:
    async def test() -> None:
        async with serving(stall_s=1.5) as client:
            os.kill(pid_of(client), signal.SIGSTOP)
            answer = Asked(client, Submit(0, prompt_of(engine), SETTINGS[0]))
            with pytest.raises(EngineGone, match=r"sent nothing for serve.stall_s=1.5 seconds: send"):
                await answer.accepted()
            await client.wait_ready()
            assert (await whole(Asked(client, Submit(0, prompt_of(engine), SETTINGS[0])))).done.error is None
            assert client.num_restarts == 1

    run_async(test())


class SocketChild(LocalChild):
    """A child without a process. `theirs` is the other end of its socket, which is closed when the child is killed."""

    def __init__(self, theirs: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.theirs = theirs
        self.was_killed = False
        self._reader, self._writer = reader, writer

    @classmethod
    async def start(cls) -> "SocketChild":
        ours, theirs = socket.socketpair()
        theirs.sendall(encode(READY))
        return cls(theirs, *await asyncio.open_connection(sock=ours))

    def kill(self) -> None:
        self.was_killed = True
        self.theirs.close()

    async def ended(self) -> str:
        return "was ended by SIGKILL"

    async def close(self) -> None:
        self.kill()
        self._writer.close()


def test_frames_that_arrived_while_the_server_was_blocked_are_not_silence() -> None:
    async def test() -> None:
        stall_s = 0.2
        client = EngineClient(RunConfig(Task.serve, serve=ServeConfig(stall_s=stall_s)), SocketChild.start)
        await client.start()
        await client.wait_ready()
        answer = client.submit(Submit(0, [5], {}), asyncio.Event())
        await asyncio.sleep(0)  # the loop has the timer
        child = client._child
        assert isinstance(child, SocketChild)
        child.theirs.sendall(encode(Accepted(answer.submit.id, 3)))
        time.sleep(3 * stall_s)  # blocks the event loop, whose next turn finds the timer expired and the frame unread
        assert await answer.accepted() == 3
        assert not child.was_killed
        second = client.submit(Submit(0, [5], {}), asyncio.Event())
        with pytest.raises(EngineGone, match=r"sent nothing for serve.stall_s=0.2 seconds"):
            await second.accepted()  # silent for now
        await client.close()

    run_async(test())


@pytest.mark.long
def test_requests_in_two_crashes_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def crash(client: EngineClient, poison: Submit, other: Submit) -> None:
        answers = [Asked(client, submit) for submit in (poison, other)]
        await first_token(answers[0])
        os.kill(pid_of(client), signal.SIGKILL)
        for answer in answers:
            assert isinstance(await ended(answer), EngineGone)
        await client.wait_ready()

    async def test() -> None:
        poison = Submit(0, prompt_of(engine), ENDLESS, streams=True)
        other = Submit(0, prompt_of(engine, TEXTS[1]), ENDLESS)
        async with serving() as client:
            await crash(client, poison, other)
            assert (await whole(Asked(client, other))).done.error is None  # which clears it
            await crash(client, poison, other)
            refused = Asked(client, poison)
            with pytest.raises(EngineRefused, match=f"the engine crashed, {MAX_CRASHES} times: it is not run again"):
                await refused.accepted()
            assert isinstance(await ended(refused), EngineRefused)
            assert (await whole(Asked(client, other))).done.error is None

    run_async(test())


def test_two_sendings_are_the_same_whatever_seed_was_drawn() -> None:
    first = Submit(0, [5, 6], {"seed": 1, "temperature": 0.5})
    assert digest_of(first) == digest_of(Submit(7, [5, 6], {"temperature": 0.5, "seed": 2}))
    others = [Submit(0, [5], first.decode), Submit(0, [5, 6], {"seed": 1}), Submit(0, [5, 6], first.decode, "fr")]
    assert digest_of(first) not in map(digest_of, others)


@pytest.mark.long
@each("value", [10**30, -(10**30), "\ud800"])
def test_a_value_that_no_frame_can_encode_is_refused_and_leaves_nothing(engine: Engine, value: object) -> None:
    async def test() -> None:
        async with serving() as client:
            answer = Asked(client, Submit(0, prompt_of(engine), {"guide": {"json_schema": {"const": value}}}))
            with pytest.raises(EngineRefused, match="the request has a value that a frame cannot encode"):
                await answer.accepted()
            assert client._answers == {}
            assert (await whole(Asked(client, Submit(0, prompt_of(engine), SETTINGS[0])))).done.error is None

    run_async(test())


def test_who_waits_for_the_end_hears_what_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: EngineClient) -> str:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(EngineClient, "_run_child", fail)

    async def test() -> None:
        client = EngineClient(tiny_run())
        await client.start()
        with pytest.raises(RuntimeError, match="no such luck"):
            await client.ended()

    run_async(test())


@pytest.mark.long
def test_an_engine_that_sends_what_is_not_a_frame_is_ended(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process reports that it is ready, and answers its first request with garbage; then the real process starts."""
    script, used = tmp_path / "garbage.py", tmp_path / "used"
    script.write_text(
        f"import pathlib, runpy, socket, sys, msgspec\n"
        f"used = pathlib.Path({str(used)!r})\n"
        "if used.exists():\n"
        "    runpy.run_module('pipelines.replicas.engine_process', run_name='__main__')\n"
        "    sys.exit()\n"
        "used.touch()\n"
        "from pipelines.replicas.engine_process.frames import Ready, encode\n"
        "connection = socket.socket(fileno=int(sys.argv[1]))\n"
        "connection.recv(1 << 20)\n"
        "connection.sendall(encode(Ready(99, 99, None, {}, 99)))\n"
        "connection.recv(1 << 20)\n"
        "connection.sendall(b'HTTP/1.1 200 OK')\n"
        "connection.recv(1)\n"
    )
    monkeypatch.setattr(module, "COMMAND", (sys.executable, str(script)))

    async def test() -> None:
        async with serving() as client:
            answer = Asked(client, Submit(0, prompt_of(engine), SETTINGS[0]))
            with pytest.raises(EngineGone, match="the engine sent bytes that are not a frame .*is longer than"):
                await answer.accepted()
            await client.wait_ready()
            assert (await whole(Asked(client, Submit(0, prompt_of(engine), SETTINGS[0])))).done.error is None

    run_async(test())


async def failure_of(client: EngineClient) -> str:
    await client.start()
    try:
        with pytest.raises(UserError) as raised:
            await client.wait_ready()
        return str(raised.value)
    finally:
        await client.close()


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_is_an_error_of_one_line(tmp_path: Path) -> None:
    client = EngineClient(run_config(tmp_path))
    assert "config.json" in run_async(failure_of(client))
    too_many = EngineClient(replace(tiny_run(), task=Task.serve, serve=ServeConfig(batch_size=4096)))
    assert "batch_size=4096 is more than device.max_batched_tokens=2048" in run_async(failure_of(too_many))


def test_an_engine_that_ends_while_it_loads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    client = EngineClient(tiny_run())
    assert run_async(failure_of(client)) == "the engine was ended by SIGKILL while it loaded the model"
    monkeypatch.setattr(module, "COMMAND", ("/no/such/python",))
    client = EngineClient(tiny_run())
    assert "the engine cannot be started (" in run_async(failure_of(client))


@pytest.mark.long
def test_closing_ends_what_runs(engine: Engine) -> None:
    async def test() -> None:
        async with serving() as client:
            answer = Asked(client, Submit(0, prompt_of(engine), ENDLESS))
            await answer.accepted()
            pid = pid_of(client)
        assert isinstance(await ended(answer), EngineGone)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(EngineGone):
            Asked(client, Submit(0, [1], {}))

    run_async(test())


@pytest.mark.long
def test_a_hung_engine_does_not_outlive_its_parent() -> None:
    """It reads no more, so it does not notice that its socket is closed."""
    code = (
        "import asyncio\n"
        "from tests.helpers.serving import serving\n"
        "async def wait():\n"
        "    async with serving() as client:\n"
        "        print(client._child.pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(wait())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())  # type: ignore[union-attr]
    child_end = os.pidfd_open(pid)
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    ended, _, _ = select.select([child_end], [], [], LIMIT_S)
    os.close(child_end)
    assert ended


def child(sent: bytes) -> subprocess.CompletedProcess[str]:
    """Start the engine's process, and send it these bytes; without bytes, close its socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        if not sent:
            ours.shutdown(socket.SHUT_WR)
        command, number = [*COMMAND, str(theirs.fileno())], theirs.fileno()
        paths = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(command, env=paths, pass_fds=[number], capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.long
@each(
    ("sent", "code", "said_last"),
    [
        (b"", 0, ""),
        (b"\0\0\0\2\xc1\xc1", 1, "error: a frame cannot be read"),
        (b"GET / HTTP/1.1\r\n", 1, "is longer than"),
        (encode(Cancel(3)), 1, "the first frame is not Start"),
    ],
)
def test_the_process_ends_where_it_is_left_or_told_nonsense(sent: bytes, code: int, said_last: str) -> None:
    done = child(sent)
    assert done.returncode == code, done.stderr
    assert said_last in said(done.stderr)
    assert "Traceback" not in done.stderr


@true_starts()
def test_the_client_loads_no_torch() -> None:
    code = "import sys, pipelines.replicas.engine_process.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
