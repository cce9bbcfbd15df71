"""The HTTP process's view of the engine: a child process that is started, sent requests, and restarted."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import msgspec

from conf.errors import UserError
from conf.schema import RunConfig
from pipelines.jobs.run_log import log_folder
from pipelines.replicas.engine_process.adapter_changes import AdapterChanges
from pipelines.replicas.engine_process.child import END_S, Child, LocalChild
from pipelines.replicas.engine_process.frames import (
    Accepted,
    AdapterChanged,
    Beat,
    Began,
    Cancel,
    Delta,
    Deltas,
    Done,
    FrameReader,
    FromEngine,
    LoadAdapter,
    Ready,
    Refused,
    Start,
    Submit,
    SubmitPooled,
    UnloadAdapter,
    Unready,
    encode,
)
from pipelines.replicas.engine_process.suspects import MAX_CRASHES, Suspects

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0


class EngineGone(Exception):
    """No engine is available, or it ended before the response was complete. A retry of the same request may succeed."""


class EngineRefused(Exception):
    """The engine rejects a request or an adapter."""

    def __init__(self, message: str, is_missing: bool = False) -> None:
        """`is_missing`: as in AdapterChanged."""
        super().__init__(message)
        self.message = message
        self.is_missing = is_missing


class RemoteEngine(Protocol):
    """The engine in another process, as the server uses it: an `EngineClient`, or the replicas behind one address."""

    @property
    def info(self) -> Ready | None:
        """The loaded model, or None while no model is loaded."""

    @property
    def beat(self) -> Beat | None: ...
    @property
    def num_restarts(self) -> int: ...
    def submit(self, submit: Submit | SubmitPooled, news: asyncio.Event) -> "Answer": ...
    async def load_adapter(self, adapter: LoadAdapter) -> str:
        """Load an adapter, also after a restart, and return its digest. Raises EngineRefused and EngineGone."""

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no request uses. Raises EngineRefused."""


class Answer:
    """One request in flight. A caller that abandons it calls `cancel`."""

    def __init__(self, client: "EngineClient", submit: Submit | SubmitPooled, news: asyncio.Event) -> None:
        """`news`: an event that is set when `take` has an item, and at the end of the request."""
        self._client = client
        self.submit = submit
        self._seed: int | None = None
        self._waiting: dict[int, Delta] = {}  # deltas not yet taken, by sample
        self._done: Done | None = None
        self._error: Exception | None = None
        self._has_ended = False
        self._is_accepted = asyncio.Event()
        self._news = news

    async def accepted(self) -> int:
        """Wait until the engine accepts the request, and return the seed. Raises EngineRefused and EngineGone."""
        await self._is_accepted.wait()
        if self._seed is None:
            raise self._error or EngineGone("the request was cancelled")
        return self._seed

    @property
    def is_over(self) -> bool:
        """Whether the request has ended and the caller has taken every item."""
        return self._has_ended and not self._waiting and self._error is None and self._done is None

    def take(self) -> Delta | Done | None:
        """Return the next item: a merged delta of one sample, or the final Done. Return None if no item is available.

        Raises EngineRefused. Raises EngineGone after all deltas that had arrived.
        """
        if self._waiting:
            return self._waiting.pop(next(iter(self._waiting)))
        done, self._done = self._done, None
        if self._error is not None:
            raise self._error
        return done

    def cancel(self) -> None:
        """Cancel the request. The engine drops it within a step. Does nothing if the request has ended."""
        if not self._has_ended:
            self._waiting.clear()
            self._end()
            self._client.forget(self)

    def accept(self, seed: int) -> None:
        self._seed = seed
        self._is_accepted.set()

    def add(self, delta: Delta) -> None:
        """Add a delta. It is merged with the delta of the same sample that was not yet taken."""
        pending = self._waiting.setdefault(delta.sample, delta)
        if pending is not delta:
            pending.text += delta.text
            pending.token_ids += delta.token_ids
            pending.logprobs += delta.logprobs
            pending.finish_reason, pending.stop_reason = delta.finish_reason, delta.stop_reason
        self._news.set()

    def end(self, end: Done | Exception) -> None:
        if isinstance(end, Done):
            self._done = end
        else:
            self._error = end
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._is_accepted.set()
        self._news.set()


class EngineClient:
    """Starts the engine's process, sends requests to it, and restarts it if it ends or hangs. For one event loop."""

    def __init__(
        self,
        run: RunConfig,
        start_child: Callable[[], Awaitable[Child]] = LocalChild.start,
        suspects: Suspects | None = None,
    ) -> None:
        """`start_child` raises OSError if it cannot start a process. Clients of the same model share `suspects`."""
        self.info: Ready | None = None
        """None while the model loads, also during a restart."""
        self.beat: Beat | None = None
        """The last Beat frame of the child."""
        self.num_restarts = 0
        self._run = run
        self._config = run.serve
        self._answers: dict[int, Answer] = {}
        self._num_submitted = 0
        self._begun: set[int] = set()  # requests that the child prepares, checks or computes
        self._adapters = AdapterChanges(run.model.adapters or {}, self._update_adapters)
        self._suspects = Suspects() if suspects is None else suspects
        self._start_child = start_child
        self._child: Child | None = None
        self._end_reason: str | None = None  # the reason for which the child was ended
        self._stall: asyncio.TimerHandle | None = None
        self._heard_s = 0.0  # event loop time at which the current wait for the child began
        self._is_late = False  # whether the current wait is the second one
        self._was_ready = False
        self._is_settled = asyncio.Event()  # set when the model is loaded or loading has failed
        self._failure: UserError | None = None
        self._is_closing = False
        self._backoff_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._keep_running())

    async def wait_ready(self) -> Ready:
        """Wait until the model is loaded. Raises UserError if the first load fails, and EngineGone after `close`."""
        while self.info is None:
            if self._failure or self._is_closing:
                raise self._failure or EngineGone("the engine is closed")
            self._is_settled.clear()
            await self._is_settled.wait()
        return self.info

    @property
    def num_requests(self) -> int:
        return len(self._answers)

    def submit(self, submit: Submit | SubmitPooled, news: asyncio.Event) -> Answer:
        """Send a request and give it an `id`. `news`: see Answer. Raises EngineGone if no engine is ready."""
        if self.info is None or self._child is None:
            raise EngineGone("the engine is loading its model")
        self._num_submitted += 1
        answer = Answer(self, msgspec.structs.replace(submit, id=self._num_submitted), news)
        try:
            frame = encode(answer.submit)
        except (OverflowError, UnicodeEncodeError) as error:  # an integer beyond 64 bits, or half a surrogate pair
            answer.end(EngineRefused(f"the request has a value that a frame cannot encode ({error}): leave it out"))
            return answer
        if self._suspects.has(submit):
            message = f"this request was running when the engine crashed, {MAX_CRASHES} times"
            answer.end(EngineRefused(f"{message}: it is not run again"))
            return answer
        self._answers[answer.submit.id] = answer
        if len(self._answers) == 1:
            self._watch()
        self._child.write(frame)
        return answer

    def forget(self, answer: Answer) -> None:
        """Cancel a request in the engine."""
        self._begun.discard(answer.submit.id)
        if self._answers.pop(answer.submit.id, None) and self._child is not None:
            self._child.write(encode(Cancel(answer.submit.id)))

    async def load_adapter(self, adapter: LoadAdapter) -> str:
        """Load an adapter, also after a restart, and return its digest. Raises EngineRefused and EngineGone."""
        digest = (await self._change_adapters(adapter)).digest
        assert digest is not None
        self._adapters.want(adapter.of(digest))
        self._update_adapters()
        return digest

    def expect_adapter(self, adapter: LoadAdapter) -> None:
        """Let the process load an adapter, whose digest is known, before any further request, if it lacks the adapter."""
        self._adapters.want(adapter)
        if self.info is not None and self._child is not None and adapter.name not in self.info.adapters:
            self._adapters.restore(adapter, self._child.write)
        self._update_adapters()

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no request uses. Does nothing if the process lacks it. Raises EngineRefused."""
        is_loaded = name in self._adapters.digests
        self._adapters.forget(name)
        self._update_adapters()
        if is_loaded:
            with suppress(EngineGone):  # a restarted process lacks it
                await self._change_adapters(UnloadAdapter(0, name))

    async def _change_adapters(self, change: LoadAdapter | UnloadAdapter) -> AdapterChanged:
        if self.info is None or self._child is None:
            raise EngineGone("the engine is loading its model")
        answer = self._adapters.send(change, self._child.write)
        self._watch()
        changed = await answer
        if changed.error is not None:
            raise EngineRefused(changed.error, changed.is_missing)
        return changed

    def _update_adapters(self) -> None:
        if self.info is not None:
            self.info = self.info.having(self._adapters.digests)

    async def ended(self) -> None:
        """Wait until the client stops restarting the engine. Raises the error that stopped it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """End the engine's process. Requests in flight end with EngineGone."""
        self._is_closing = True
        if self._task is None:
            return
        if self._child is not None:
            self._child.write_eof()
            await asyncio.wait([self._task], timeout=END_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep_running(self) -> None:
        try:
            while True:
                reason = await self._run_child()
                self._lose_answers(reason)
                if self._failure or self._is_closing:
                    return
                if not self._was_ready:
                    self._fail(UserError(f"the engine {reason} while it loaded the model"))
                    return
                log.error("the engine %s: it is restarted", reason)
                self.num_restarts += 1
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(MAX_BACKOFF_S, max(1.0, 2 * self._backoff_s))
        finally:
            self._is_closing = True
            self._lose_answers("is closed")
            self._is_settled.set()

    async def _run_child(self) -> str:
        """Run a child until it ends, hangs, or sends an invalid frame. Return a phrase that says which."""
        try:
            child = await self._start_child()
        except OSError as error:
            return f"cannot be started ({error})"
        self._child, self._end_reason = child, None
        try:
            folder = None if (path := log_folder()) is None else str(path)
            child.write(encode(Start(self._run_to_start(), folder)))
            await self._receive(child)
            reason = await child.ended()
            return self._end_reason or reason
        finally:
            self.info, self.beat, self._child = None, None, None
            await child.close()

    def _run_to_start(self) -> RunConfig:
        """Return the run of the next process. A restarted process gets its adapters after its model."""
        return replace(self._run, model=replace(self._run.model, adapters=None)) if self._was_ready else self._run

    async def _receive(self, child: Child) -> None:
        frames = FrameReader(FromEngine)
        while received := await child.read():
            try:
                for frame in frames.read(received):
                    self._take(frame)
            except UserError as error:
                self._end_child(f"sent bytes that are not a frame ({error})")
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
            case Began():
                self._begun.update(id for id in frame.ids if id in self._answers)
            case Accepted():
                self._begun.discard(frame.id)  # from here on the request waits for its first step
                if answer := self._answers.get(frame.id):
                    answer.accept(frame.seed)
            case Refused():
                self._begun.discard(frame.id)
                if answer := self._answers.pop(frame.id, None):
                    answer.end(EngineRefused(frame.message))
            case Done():
                self._begun.discard(frame.id)
                if answer := self._answers.pop(frame.id, None):
                    answer.end(frame)
                    self._backoff_s = 0.0
                    if frame.error is None:
                        self._suspects.cleared(answer.submit)
            case AdapterChanged():
                self._adapters.take(frame)
            case Ready():
                assert self._child is not None
                self._adapters.restore_all(frame, self._child.write)
                self.info, self._was_ready = frame, True
                self._update_adapters()
                self._is_settled.set()
            case Unready():
                self._end_reason = f"cannot load the model ({frame.message})"
                if not self._was_ready:
                    self._fail(UserError(frame.message))

    def _fail(self, error: UserError) -> None:
        self._failure = error
        self._is_settled.set()

    def _watch(self) -> None:
        """Restart the stall timer: the time in which the child must send a frame while requests are in flight.

        The limit is split into two waits. If the event loop itself was blocked during the first wait, the second wait
        gives it time to read the frames that have arrived.
        """
        loop = asyncio.get_running_loop()
        self._heard_s, self._is_late = loop.time(), False
        if self._stall is None:
            self._stall = loop.call_later(self._config.stall_s / 2, self._waited)

    def _waited(self) -> None:
        """Check whether a wait is over. One timer serves all frames: a timer per frame costs more than reading it."""
        self._stall = None
        if not (self._answers or self._adapters.are_pending) or self._child is None:
            return
        loop, wait_s = asyncio.get_running_loop(), self._config.stall_s / 2
        if (left_s := self._heard_s + wait_s - loop.time()) <= 0:
            if self._is_late:
                self._end_child(f"sent nothing for serve.stall_s={self._config.stall_s} seconds")
                return
            self._heard_s, self._is_late, left_s = loop.time(), True, wait_s
        self._stall = loop.call_later(left_s, self._waited)

    def _end_child(self, reason: str) -> None:
        self._end_reason = reason
        if self._child is not None:
            self._child.kill()

    def _lose_answers(self, reason: str) -> None:
        """End the requests in flight. Unless the client is closing, count a crash for the requests that had begun."""
        lost, self._answers = self._answers, {}
        message = f"the engine {reason}" if self._is_closing else f"the engine {reason}: send the request again"
        self._adapters.lose(EngineGone(message))
        for answer in lost.values():
            answer.end(EngineGone(message))
        begun, self._begun = self._begun, set()
        if not self._is_closing:
            self._suspects.crashed(answer.submit for id, answer in lost.items() if id in begun)
