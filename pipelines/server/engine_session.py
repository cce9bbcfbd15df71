"""The use of the engine by one HTTP request: submission, cancellation, accounting and the log record."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import msgspec

from pipelines.replicas.engine_process.client import Answer, EngineGone, RemoteEngine
from pipelines.replicas.engine_process.frames import Delta, Done, Ready, Submit, SubmitPooled
from pipelines.replicas.served_adapters import ServedAdapter
from pipelines.server.admission import Admission, WaitingPrompt
from pipelines.server.api.errors import SERVER_ERROR, ApiError, engine_gone, loading
from pipelines.server.api.generation import Named, RequestContext
from pipelines.server.api.pooling import IN_ENGINE
from pipelines.server.metrics import Metrics
from pipelines.server.records import Record
from pipelines.server.responses.store import ResponseStore


@dataclass(eq=False)
class _InFlightPrompt:
    """A prompt that was sent to the engine."""

    answer: Answer
    waiting: WaitingPrompt | None
    """None for background requests."""
    last_s: dict[int, float] = field(default_factory=dict)
    """Event loop time of the last delta, by sample, in seconds."""
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Number of generated tokens, by sample."""
    finish: list[str] = field(default_factory=list)


class EngineSession:
    """One HTTP request's access to the engine.

    The caller calls `submit`, `accepted` and `deltas` in this order. It calls `end` in every case.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        admission: Admission,
        metrics: Metrics,
        record: Record,
        context: RequestContext,
        named: Named,
        response_store: ResponseStore | None = None,
        adapter: ServedAdapter | None = None,
    ) -> None:
        """`named`: the adapter or soft prefix that the request's `model` selects.

        `adapter`: the adapter, which stays loaded until `end`.
        """
        self.context = context
        self.record = record
        self.named = named
        self.response_store = response_store
        self.dones: dict[int, Done] = {}
        """Final frames by prompt index: token counts, or the embedding."""
        self._adapter = adapter
        if adapter is not None:
            adapter.began()
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._in_flight: list[_InFlightPrompt] = []
        self._news = asyncio.Event()

    @property
    def info(self) -> Ready:
        """The loaded model with the request's adapter or soft prefix. Raises ApiError (503) without a model."""
        return loaded(self._engine).with_named(*self.named)

    @property
    def max_part(self) -> int:
        """The most prompts at a time of a request that is computed in parts."""
        return min(IN_ENGINE, self._admission.max_sequences)

    def submit(self, submits: Sequence[Submit | SubmitPooled]) -> None:
        """Send prompts to the engine. The session's earlier prompts must have ended. Raises ApiError (429, 503).

        Only the first prompts are refused with 429: a request that has begun continues.
        """
        assert all(in_flight.answer.is_over for in_flight in self._in_flight)
        self._in_flight.clear()
        self.dones.clear()
        is_background = self.record.batch is not None
        if self.record.submitted_s is None:
            if not is_background:
                self._admission.check(sum(len(submit.prompt_token_ids) for submit in submits))
            self.record.submitted_s = time.time() - self.record.began
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
        """Wait until the engine has accepted all prompts. Raises EngineRefused and ApiError (503)."""
        for in_flight in self._in_flight:
            try:
                seed = await in_flight.answer.accepted()
            except EngineGone as gone:
                raise engine_gone(gone, 503) from gone
            if self.record.seed is None:
                self.record.seed = seed

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield each delta with the index of its prompt. Raises ApiError (500) if the engine fails.

        A delta is taken only when the caller asks for it. If the caller is slow, the waiting deltas are merged.
        """
        while not all(in_flight.answer.is_over for in_flight in self._in_flight):
            await self._news.wait()
            self._news.clear()
            has_more = True
            while has_more:
                has_more = False
                for prompt, in_flight in enumerate(self._in_flight):
                    if (delta := self._take(prompt, in_flight)) is not None:
                        has_more = True
                        yield prompt, delta

    def _take(self, prompt: int, in_flight: _InFlightPrompt) -> Delta | None:
        """Return the next delta of a prompt, or None if none is available or the prompt has ended."""
        try:
            answer_part = in_flight.answer.take()
        except EngineGone as gone:
            raise engine_gone(gone, 500) from gone
        if answer_part is None:
            return None
        self._begun(in_flight.waiting)
        if isinstance(answer_part, Delta):
            self._watch(in_flight, answer_part)
            return answer_part
        self.dones[prompt] = answer_part
        self._count(in_flight, answer_part)
        if answer_part.error is not None:
            raise ApiError(500, answer_part.error, SERVER_ERROR)
        return None

    def end(self, reason: str | None = None) -> None:
        """Cancel all prompts that have not ended. `reason`: the reason of an early end."""
        for in_flight in self._in_flight:
            self._begun(in_flight.waiting)
            in_flight.answer.cancel()
        if self._adapter is not None:
            self._adapter.done()
            self._adapter = None
        if reason is not None:
            self.record.finish.append(reason)
            self._metrics.ended_early(reason)

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
            record.queue_s, record.first_token_s, record.engine_s = done.queue_s, done.first_token_s, done.total_s
        self._metrics.done(done, finish, list(in_flight.num_tokens.values()), record.key)


def loaded(engine: RemoteEngine) -> Ready:
    """Return the loaded model's properties. Raises ApiError (503) while no model is loaded."""
    if engine.info is None:
        raise loading()
    return engine.info
