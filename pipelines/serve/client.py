"""The engine as the HTTP process knows it: a child process that is started, asked, and started again."""

import asyncio
import hashlib
import logging
import os
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec

from conf.errors import UserError
from conf.schema import RunConfig
from conf.serving import ServeConfig
from pipelines.serve.frames import (
    Accepted,
    Beat,
    Cancel,
    Delta,
    Deltas,
    Done,
    FrameReader,
    FromEngine,
    Ready,
    Refused,
    Start,
    Submit,
    SubmitPooled,
    Unready,
    encode,
)

log = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-P", "-m", "pipelines.serve.engine_process")
CHUNK = 1 << 20  # bytes
MAX_BACKOFF_S = 30.0
END_S = 5.0  # for a child that was asked to end
MAX_CRASHES = 2  # that a request may have been in
MAX_SUSPECTS = 4096  # requests whose crashes are remembered


class EngineGone(Exception):
    """There is no engine, or it ended before the answer did. The same request may succeed a little later."""


class EngineRefused(Exception):
    """The engine cannot run a request. `setting`: as in frames.Refused."""

    def __init__(self, message: str, setting: str | None = None) -> None:
        super().__init__(message)
        self.message, self.setting = message, setting


class Answer:
    """One request on its way. Whoever leaves it before its end calls `cancel`."""

    def __init__(self, client: "EngineClient", submit: Submit | SubmitPooled) -> None:
        self._client = client
        self.submit = submit
        self._seed: int | None = None
        self._waiting: dict[int, Delta] = {}  # by sample
        self._done: Done | None = None
        self._error: Exception | None = None
        self._is_over = False
        self._is_accepted = asyncio.Event()
        self._has_news = asyncio.Event()

    async def accepted(self) -> int:
        """Wait for the engine's word, and return the seed. Raises EngineRefused and EngineGone."""
        await self._is_accepted.wait()
        if self._seed is None:
            raise self._error or EngineGone("the request was cancelled")
        return self._seed

    async def __aiter__(self) -> AsyncIterator[Delta | Done]:
        """Yield what comes, deltas of a sample that wait merged into one, and at last the Done, unless it was cancelled.

        Raises EngineRefused, and EngineGone behind what had come before.
        """
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            while self._waiting:
                yield self._waiting.pop(next(iter(self._waiting)))
            if self._is_over:
                break
        if self._error is not None:
            raise self._error
        if self._done is not None:
            yield self._done

    def cancel(self) -> None:
        """Leave the request, which ends within a step; it does nothing behind the end."""
        if not self._is_over:
            self._waiting.clear()
            self._end()
            self._client.forget(self)

    def accept(self, seed: int) -> None:
        """Take the engine's word."""
        self._seed = seed
        self._is_accepted.set()

    def add(self, delta: Delta) -> None:
        """Take what a sample has said."""
        known = self._waiting.setdefault(delta.sample, delta)
        if known is not delta:
            known.text += delta.text
            known.token_ids += delta.token_ids
            known.logprobs += delta.logprobs
            known.finish_reason, known.stop_reason = delta.finish_reason, delta.stop_reason
        self._has_news.set()

    def end(self, end: Done | Exception) -> None:
        """Take the end."""
        if isinstance(end, Done):
            self._done = end
        else:
            self._error = end
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._is_accepted.set()
        self._has_news.set()


class EngineClient:
    """Starts the engine's process, hands it requests, and starts it again where it ends or hangs. For one event loop."""

    def __init__(self, run: RunConfig, config: ServeConfig) -> None:
        self.info: Ready | None = None
        """None while the model is loaded, the first time or again."""
        self.beat: Beat | None = None
        """The child's last one."""
        self.num_restarts = 0
        self._run = run
        self._config = config
        self._answers: dict[int, Answer] = {}
        self._num_submitted = 0
        self._crashes: OrderedDict[bytes, int] = OrderedDict()  # that a request was in, by its digest
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._why: str | None = None  # the child was ended
        self._stall: asyncio.TimerHandle | None = None
        self._was_ready = False
        self._is_settled = asyncio.Event()  # whether the model is loaded, or cannot be
        self._failure: UserError | None = None
        self._is_closing = False
        self._backoff_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to load the model."""
        self._task = asyncio.create_task(self._keep_running())

    async def wait_ready(self) -> Ready:
        """Wait until the model is loaded. Raises UserError where it cannot be loaded the first time, and EngineGone behind `close`."""
        while self.info is None:
            if self._failure or self._is_closing:
                raise self._failure or EngineGone("the engine is closed")
            self._is_settled.clear()
            await self._is_settled.wait()
        return self.info

    def submit(self, submit: Submit | SubmitPooled) -> Answer:
        """Send a request, whose `id` is given here. Raises EngineGone where no engine is ready."""
        if self.info is None or self._writer is None:
            raise EngineGone("the engine is loading its model")
        self._num_submitted += 1
        answer = Answer(self, msgspec.structs.replace(submit, id=self._num_submitted))
        try:
            frame = encode(answer.submit)
        except (OverflowError, UnicodeEncodeError) as error:  # a number beyond 64 bits, half a surrogate pair
            answer.end(EngineRefused(f"the request has what no frame can hold ({error}): leave it out"))
            return answer
        if self._crashes and self._crashes.get(digest_of(submit), 0) >= MAX_CRASHES:
            what = f"this request was running when the engine crashed, {MAX_CRASHES} times"
            answer.end(EngineRefused(f"{what}: it is not run again"))
            return answer
        self._answers[answer.submit.id] = answer
        if len(self._answers) == 1:
            self._watch()
        self._writer.write(frame)
        return answer

    def forget(self, answer: Answer) -> None:
        """Cancel a request in the engine."""
        if self._answers.pop(answer.submit.id, None) and self._writer is not None:
            self._writer.write(encode(Cancel(answer.submit.id)))

    async def ended(self) -> None:
        """Wait until nobody keeps the engine running. Raises what ended that."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """End the engine's process. Requests on their way end with EngineGone."""
        self._is_closing = True
        if self._task is None:
            return
        if self._writer is not None:
            self._writer.write_eof()
            await asyncio.wait([self._task], timeout=END_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep_running(self) -> None:
        try:
            while True:
                why = await self._run_child()
                self._lose_answers(why)
                if self._failure or self._is_closing:
                    return
                if not self._was_ready:
                    self._fail(UserError(f"the engine {why} while it loaded the model"))
                    return
                log.error("the engine %s: it is started again", why)
                self.num_restarts += 1
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(MAX_BACKOFF_S, max(1.0, 2 * self._backoff_s))
        finally:
            self._is_closing = True
            self._lose_answers("is closed")
            self._is_settled.set()

    async def _run_child(self) -> str:
        """Run a child until it ends, hangs, or sends what is no frame. Returns which."""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        try:
            process = await asyncio.create_subprocess_exec(
                *(*COMMAND, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # a terminal's interrupt is for the parent alone
                env={**os.environ, "PYTHONPATH": path, "QUINTET_API_KEYS": ""},
            )
        except OSError as error:
            ours.close()
            return f"cannot be started ({error})"
        finally:
            theirs.close()
        self._process, self._why = process, None
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            self._writer.write(encode(Start(self._run, self._config)))
            await self._receive(reader)
            await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=END_S)
            return self._why or _ended(process.returncode)
        finally:
            self.info, self.beat, self._process = None, None, None
            self._watch()
            self._writer.close()
            self._writer = None
            _kill(process)
            await process.wait()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Take frames until the child closes the socket or sends what is none."""
        frames = FrameReader(FromEngine)
        with suppress(ConnectionError):  # of a child that has left what it was sent unread
            while received := await reader.read(CHUNK):
                try:
                    for frame in frames.read(received):
                        self._take(frame)
                except UserError as error:
                    self._end_child(f"sent what is no frame ({error})")
                    return
                self._watch()

    def _take(self, frame: FromEngine) -> None:
        match frame:
            case Deltas():
                for delta in frame.deltas:
                    if answer := self._answers.get(delta.id):
                        answer.add(delta)
            case Beat():
                self.beat = frame
            case Accepted():
                if answer := self._answers.get(frame.id):
                    answer.accept(frame.seed)
            case Refused():
                if answer := self._answers.pop(frame.id, None):
                    answer.end(EngineRefused(frame.message, frame.setting))
            case Done():
                if answer := self._answers.pop(frame.id, None):
                    answer.end(frame)
                    self._backoff_s = 0.0
                    if self._crashes and frame.error is None:
                        self._crashes.pop(digest_of(answer.submit), None)
            case Ready():
                self.info, self._was_ready = frame, True
                self._is_settled.set()
            case Unready():
                self._why = f"cannot load the model ({frame.message})"
                if not self._was_ready:
                    self._fail(UserError(frame.message))

    def _fail(self, error: UserError) -> None:
        self._failure = error
        self._is_settled.set()

    def _watch(self) -> None:
        """Wait for the child's next frame, no longer than it may take while there are requests."""
        if self._stall is not None:
            self._stall.cancel()
        self._stall = None
        if self._answers and self._process is not None:
            why = f"said nothing for serve.stall_s={self._config.stall_s} seconds"
            self._stall = asyncio.get_running_loop().call_later(self._config.stall_s, self._end_child, why)

    def _end_child(self, why: str) -> None:
        self._why = why
        if self._process is not None:
            _kill(self._process)

    def _lose_answers(self, why: str) -> None:
        """End the requests on their way, and remember them where this was no orderly end."""
        lost, self._answers = self._answers, {}
        for answer in lost.values():
            answer.end(
                EngineGone(f"the engine {why}" if self._is_closing else f"the engine {why}: send the request again")
            )
        suspects = [] if self._is_closing else [digest_of(answer.submit) for answer in lost.values()]
        for digest in dict.fromkeys(suspects):  # each once, however often it was sent
            self._crashes[digest] = self._crashes.pop(digest, 0) + 1
        while len(self._crashes) > MAX_SUSPECTS:
            self._crashes.popitem(last=False)


def digest_of(submit: Submit | SubmitPooled) -> bytes:
    """Return what two sendings of the same request have in common: all but the seed, which is drawn where none is given."""
    options = None
    if isinstance(submit, Submit):
        options = {name: value for name, value in submit.decode.items() if name != "seed"}, submit.adapter
    content = msgspec.msgpack.encode((submit.prompt_token_ids, options), order="deterministic")
    return hashlib.sha256(content).digest()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _ended(returncode: int | None) -> str:
    """Return how a process ended."""
    if returncode is None:
        return "closed its socket"
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"
