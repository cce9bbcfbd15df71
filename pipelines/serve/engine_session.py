"""One request's dealings with the engine: what it has there is counted, measured, recorded, and cancelled when the request ends."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import msgspec

from pipelines.api.errors import SERVER_ERROR, ApiError, engine_gone, loading
from pipelines.api.generation import RequestContext
from pipelines.api.named import Named
from pipelines.engine_process.client import Answer, EngineGone, RemoteEngine
from pipelines.engine_process.frames import Delta, Done, Ready, Submit, SubmitPooled
from pipelines.serve.admission import Admission, WaitingPrompt
from pipelines.serve.metrics import Metrics
from pipelines.serve.records import Record


@dataclass(eq=False)
class _InFlightPrompt:
    """A prompt in the engine."""

    answer: Answer
    waiting: WaitingPrompt | None
    """None for one of the background."""
    last_s: dict[int, float] = field(default_factory=dict)
    """When each sample has said something, in seconds of the event loop."""
    num_tokens: dict[int, int] = field(default_factory=dict)
    """By sample."""
    finish: list[str] = field(default_factory=list)


class EngineSession:
    """The engine as one request of HTTP may use it: `submit`, `accepted`, `deltas`, and always `end`."""

    def __init__(
        self,
        engine: RemoteEngine,
        admission: Admission,
        metrics: Metrics,
        record: Record,
        context: RequestContext,
        named: Named,
    ) -> None:
        """named: by the request's model."""
        self.context = context
        self.record = record
        self.named = named
        self.dones: dict[int, Done] = {}
        """By prompt: what the engine counted, or the vector."""
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._in_flight: list[_InFlightPrompt] = []
        self._news = asyncio.Event()

    @property
    def info(self) -> Ready:
        """The loaded model, as it is after the request's prefix. Raises ApiError (503) where there is none."""
        return loaded(self._engine).after(self.named.prefix)

    def submit(self, submits: Sequence[Submit | SubmitPooled]) -> None:
        """Hand prompts to the engine, after the end of those that it had. Raises ApiError (429, 503)."""
        assert all(in_flight.answer.is_over for in_flight in self._in_flight)
        self._in_flight.clear()
        self.dones.clear()
        is_background = self.record.batch is not None
        if not is_background:
            self._admission.check(sum(len(submit.prompt_token_ids) for submit in submits))
        for submit in submits:
            waiting = None if is_background else self._admission.wait(len(submit.prompt_token_ids))
            try:
                submit = msgspec.structs.replace(submit, is_background=is_background)
                answer = self._engine.submit(submit, self._news)
            except EngineGone as gone:
                self._begun(waiting)
                raise engine_gone(gone, 503) from gone
            self._in_flight.append(_InFlightPrompt(answer, waiting))

    async def accepted(self) -> None:
        """Wait until the engine has taken all prompts. Raises EngineRefused for one that it refuses, and ApiError (503)."""
        for in_flight in self._in_flight:
            try:
                seed = await in_flight.answer.accepted()
            except EngineGone as gone:
                raise engine_gone(gone, 503) from gone
            if self.record.seed is None:
                self.record.seed = seed

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield what comes, with the number of the prompt. Raises ApiError (500) where the engine fails.

        No more is taken than is read, so that deltas go on merging for slow readers.
        """
        while not all(in_flight.answer.is_over for in_flight in self._in_flight):
            await self._news.wait()
            self._news.clear()
            has_more = True
            while has_more:
                has_more = False
                for prompt, in_flight in enumerate(self._in_flight):
                    if (item := self._take(prompt, in_flight)) is not None:
                        has_more = True
                        yield prompt, item

    def _take(self, prompt: int, in_flight: _InFlightPrompt) -> Delta | None:
        """Return what comes next of a prompt; None where there is nothing, or the end."""
        try:
            item = in_flight.answer.take()
        except EngineGone as gone:
            raise engine_gone(gone, 500) from gone
        if item is None:
            return None
        self._begun(in_flight.waiting)
        if isinstance(item, Delta):
            self._watch(in_flight, item)
            return item
        self.dones[prompt] = item
        self._count(in_flight, item)
        if item.error is not None:
            raise ApiError(500, item.error, SERVER_ERROR)
        return None

    def end(self, why: str | None = None) -> None:
        """Cancel whatever has not ended. `why`: the reason of an early end."""
        for in_flight in self._in_flight:
            self._begun(in_flight.waiting)
            in_flight.answer.cancel()
        if why is not None:
            self.record.finish.append(why)
            self._metrics.ended_early(why)

    def _begun(self, waiting: WaitingPrompt | None) -> None:
        if waiting is not None:
            self._admission.begun(waiting)

    def _watch(self, in_flight: _InFlightPrompt, delta: Delta) -> None:
        now, num_tokens = asyncio.get_running_loop().time(), len(delta.token_ids)
        if (last := in_flight.last_s.get(delta.sample)) is not None and num_tokens:
            self._metrics.between_tokens((now - last) / num_tokens)
        in_flight.last_s[delta.sample] = now
        in_flight.num_tokens[delta.sample] = in_flight.num_tokens.get(delta.sample, 0) + num_tokens
        if delta.finish_reason is not None:
            in_flight.finish.append(delta.finish_reason)

    def _count(self, in_flight: _InFlightPrompt, done: Done) -> None:
        record, finish = self.record, in_flight.finish if done.error is None else ["error"]
        record.num_prompt_tokens += done.num_prompt_tokens
        record.num_cached_tokens += done.num_cached_tokens
        record.num_generated_tokens += done.num_generated_tokens
        record.finish += finish
        if record.queue_s is None:
            record.queue_s, record.first_token_s = done.queue_s, done.first_token_s
        self._metrics.done(done, finish, list(in_flight.num_tokens.values()), record.key)


def loaded(engine: RemoteEngine) -> Ready:
    """Return what the engine says of its model. Raises ApiError (503) while there is none."""
    if engine.info is None:
        raise loading()
    return engine.info
