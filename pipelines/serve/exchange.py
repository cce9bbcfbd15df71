"""One request's dealings with the engine: what it has there is counted, measured, recorded, and cancelled when the request ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from pipelines.api.errors import ApiError
from pipelines.serve.admission import Admission
from pipelines.serve.client import Answer, EngineGone, EngineRefused
from pipelines.serve.frames import Beat, Delta, Done, Ready, Submit, SubmitPooled
from pipelines.serve.metrics import Metrics
from pipelines.serve.records import Record


class Engine(Protocol):
    """The part of `EngineClient` that the server uses."""

    info: Ready | None
    beat: Beat | None
    num_restarts: int

    def submit(self, submit: Submit | SubmitPooled) -> Answer: ...


class Exchange:
    """The engine as one request of HTTP may use it."""

    def __init__(
        self, engine: Engine, admission: Admission, metrics: Metrics, record: Record, adapter: str | None
    ) -> None:
        self.record = record
        self.adapter = adapter
        """The one that the request's model names."""
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._answers: list[WatchedAnswer] = []

    @property
    def info(self) -> Ready:
        """The loaded model. Raises ApiError (503) where there is none."""
        return loaded(self._engine)

    def submit(self, submit: Submit | SubmitPooled) -> "WatchedAnswer":
        """Hand a prompt to the engine. Raises ApiError (429, 503)."""
        prompt = self._admission.wait(len(submit.prompt_token_ids))

        def begun() -> None:
            self._admission.begun(prompt)

        try:
            answer = self._engine.submit(submit)
        except EngineGone as gone:
            begun()
            raise engine_gone(gone, 503) from gone
        watched = WatchedAnswer(answer, begun, self._metrics, self.record)
        self._answers.append(watched)
        return watched

    def end(self, why: str | None = None) -> None:
        """Cancel whatever has not ended. `why`: the reason of an early end."""
        for answer in self._answers:
            answer.cancel()
        if why is not None:
            self.record.finish.append(why)
            self._metrics.ended_early(why)


class WatchedAnswer:
    """An `Answer` whose course is measured."""

    def __init__(self, answer: Answer, begun: Callable[[], None], metrics: Metrics, record: Record) -> None:
        """`begun` is called when the prompt waits no longer."""
        self._answer = answer
        self._begun = begun
        self._metrics = metrics
        self._record = record
        self._last: dict[int, float] = {}  # seconds of the event loop, by sample
        self._finish: list[str] = []
        self._num_tokens: dict[int, int] = {}  # by sample

    async def accepted(self) -> int:
        """Wait for the engine's word, and return the seed. Raises EngineRefused, and ApiError (503) where the engine ended."""
        try:
            seed = await self._answer.accepted()
        except EngineRefused:
            self._begun()
            raise
        except EngineGone as gone:
            raise engine_gone(gone, 503) from gone
        if self._record.seed is None:
            self._record.seed = seed
        return seed

    async def __aiter__(self) -> AsyncIterator[Delta | Done]:
        """Yield what comes, as `Answer` does. Raises EngineRefused, and ApiError (500) where the engine ended."""
        try:
            async for item in self._answer:
                self._watch(item)
                yield item
        except EngineGone as gone:
            raise engine_gone(gone, 500) from gone
        finally:
            self._begun()

    def cancel(self) -> None:
        """Leave the request."""
        self._begun()
        self._answer.cancel()

    def _watch(self, item: Delta | Done) -> None:
        self._begun()
        if isinstance(item, Done):
            self._end(item)
            return
        now, num_tokens = asyncio.get_running_loop().time(), len(item.token_ids)
        if (last := self._last.get(item.sample)) is not None and num_tokens:
            self._metrics.between_tokens((now - last) / num_tokens)
        self._last[item.sample] = now
        self._num_tokens[item.sample] = self._num_tokens.get(item.sample, 0) + num_tokens
        if item.finish_reason is not None:
            self._finish.append(item.finish_reason)

    def _end(self, done: Done) -> None:
        record, finish = self._record, self._finish if done.error is None else ["error"]
        record.num_prompt_tokens += done.num_prompt_tokens
        record.num_cached_tokens += done.num_cached_tokens
        record.num_generated_tokens += done.num_generated_tokens
        record.finish += finish
        if record.queue_s is None:
            record.queue_s, record.first_token_s = done.queue_s, done.first_token_s
        self._metrics.done(done, finish, list(self._num_tokens.values()), record.key)


def loaded(engine: Engine) -> Ready:
    """Return what the engine says of its model. Raises ApiError (503) while there is none."""
    if engine.info is None:
        message = "the model is still loading: send the request again"
        raise ApiError(503, message, "server_error", code="loading", headers={"retry-after": "1"})
    return engine.info


def engine_gone(gone: EngineGone, status: int) -> ApiError:
    """Return the error of an engine that ended before the answer did."""
    return ApiError(status, str(gone), "server_error", code="engine_gone", headers={"retry-after": "1"})
