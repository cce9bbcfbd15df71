"""The loop of the engine's process: read requests, run one step, send deltas."""

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from conf.errors import UserError
from pipelines.engine import Engine, Output, Request
from pipelines.engine.faults import belongs_to_request
from pipelines.engine.request import Completion, SequenceGroup, Sink, TokenLogprobs
from pipelines.engine.step_budget import StepBudget
from pipelines.jobs.text_generator import decode_of_row
from pipelines.loading.pooler import Pooler
from pipelines.replicas.engine_process.adapters import change_adapters
from pipelines.replicas.engine_process.channel import Channel
from pipelines.replicas.engine_process.frames import (
    STEP_TOKENS,
    Accepted,
    Beat,
    Began,
    Cancel,
    Delta,
    Deltas,
    Done,
    LoadAdapter,
    Logprob,
    Refused,
    Submit,
    SubmitPooled,
    ToEngine,
    UnloadAdapter,
)
from pipelines.replicas.engine_process.gate import Gate
from pipelines.replicas.engine_process.inbox import Inbox
from pipelines.replicas.engine_process.loading import Served

log = logging.getLogger(__name__)

BEAT_S = 0.1  # minimum time between two beats while steps run


@dataclass(eq=False)
class Ongoing:
    """A request that was accepted and has not ended. Times are in seconds of `time.monotonic`."""

    frame: Submit | SubmitPooled
    request: Request
    submitted_s: float
    group: SequenceGroup | None = None
    """None while a background request is not yet queued in the engine."""
    admitted_s: float | None = None
    has_begun: bool = False
    """Whether the client was told that a step may compute this request."""
    ended: set[int] = field(default_factory=set)
    """Samples of a stream whose end was sent."""

    @property
    def streams(self) -> bool:
        return isinstance(self.frame, Submit) and self.frame.streams


class EngineProcess:
    """Runs the engine's steps and exchanges frames with the HTTP process between them."""

    def __init__(
        self, channel: Channel, served: Served, max_step_ms: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: returns seconds on the time scale of the engine's outputs."""
        self._channel = channel
        self._served = served
        self._engine: Engine = served.engine
        self._pooler: Pooler | None = served.pooler
        self._clock = clock
        self._inbox = Inbox(self._prepare, channel.wake, clock)
        self._gate = Gate(clock)
        self._budget = StepBudget(max_step_ms)
        self._ongoing: dict[int, Ongoing] = {}
        self._background: deque[Ongoing] = deque()  # not yet queued in the engine
        self._last = deque[Deltas | Done]()  # last frames of ended requests, sent after the deltas that the gate holds
        self._num_preemptions = 0  # of ended requests
        self._step_s = 0.0
        self._num_steps = [0] * (len(STEP_TOKENS) + 1)  # as in Beat
        self._num_step_tokens = 0
        self._beat_s = 0.0
        self._is_told = False  # whether the last Beat frame shows the current state

    def serve(self) -> None:
        """Serve requests until the other end of the channel closes. Raises UserError for bytes that are not a frame."""
        try:
            while (frames := self._channel.receive(waits=not (self._has_work or self._inbox.is_ready))) is not None:
                for frame in frames:
                    self._take(frame)
                for submit in self._inbox.take():
                    self._submit(submit)
                self._admit_background()
                if self._has_work:
                    self._step()
                self._flush()
        finally:
            self._inbox.close()

    @property
    def _has_work(self) -> bool:
        return bool(self._engine.running or self._engine.waiting or self._background)

    def _take(self, frame: ToEngine) -> None:
        if isinstance(frame, Cancel):
            self._cancel(frame.id)
        elif isinstance(frame, Submit | SubmitPooled):
            if self._inbox.put(frame):
                self._channel.send(Began([frame.id]))
        elif isinstance(frame, LoadAdapter | UnloadAdapter):
            self._channel.send(change_adapters(self._engine, frame))
        else:
            raise UserError("a frame of this kind can only be the first one")

    def _submit(self, frame: Submit | SubmitPooled) -> None:
        self._channel.send(Began([frame.id]))
        try:
            request = replace(self._request(frame), is_background=frame.is_background)
            ongoing = Ongoing(frame, request, self._clock())
            if request.is_background:
                self._background.append(ongoing)
            else:
                ongoing.group = self._engine.add(request)
        except BaseException as error:
            if not belongs_to_request(error):
                raise
            self._channel.send(Refused(frame.id, told_error(error, frame.id)))
            return
        self._ongoing[frame.id] = ongoing
        self._channel.send(Accepted(frame.id, ongoing.request.params.seed))

    def _prepare(self, frame: Submit) -> None:
        self._engine.requests.prepare(self._served.decode.replaced(frame.decode))

    def _request(self, frame: Submit | SubmitPooled) -> Request:
        """Return the checked request. Raises UserError for a request that this model cannot run."""
        prompt = frame.prompt_token_ids
        if isinstance(frame, SubmitPooled):
            if self._pooler is None:
                raise UserError("this model continues texts, and gives neither vectors nor scores of them")
            decode = self._served.pooled_decode.replaced({"cache_salt": frame.cache_salt} if frame.cache_salt else {})
            prompt, pooling = self._pooler.without_padding(prompt), self._pooler.pooling
            return self._engine.pooled_request(frame.id, prompt, pooling, decode, frame.prefix, frame.adapter)
        if not self._served.ready.generates:
            raise UserError("this model gives vectors or scores of texts and continues none")
        decode = decode_of_row(self._served.decode, frame.decode, self._served.decode.seed)
        sink = self._sink(frame, decode.logprobs) if frame.streams else None
        return self._engine.request(frame.id, prompt, decode, sink, prefix=frame.prefix, adapter=frame.adapter)

    def _sink(self, frame: Submit, num_top: int | None) -> Sink:
        def put(sample: int, token_ids: list[int], text: str, logprobs: list[TokenLogprobs]) -> None:
            self._gate.put(frame.id, sample, token_ids, text, told_logprobs(token_ids, logprobs, num_top))

        return put

    def _admit_background(self) -> None:
        """Queue background requests while no other request waits: up to half of `max_num_requests`, at least one."""
        engine, most = self._engine, self._engine.config.max_num_requests
        while self._background and all(group.request.is_background for group in engine.waiting):
            groups = [*engine.running, *engine.waiting]
            num_background = sum(group.request.is_background for group in groups)
            if len(groups) >= most or num_background >= max(1, most // 2):
                return
            ongoing = self._background.popleft()
            ongoing.group = engine.add(ongoing.request)

    def _cancel(self, id: int) -> None:
        self._is_told = False
        if self._inbox.drop(id):
            return
        ongoing = self._ongoing.pop(id, None)
        if ongoing is None:  # the request has ended in the meantime
            return
        if ongoing.group is None:
            self._background.remove(ongoing)
        else:
            self._engine.cancel(ongoing.group)
            self._num_preemptions += ongoing.group.num_preemptions
        self._gate.drop(id)

    def _tell_begun(self) -> None:
        """Report the requests that the next step may begin to compute, because the step may crash the process."""
        engine = self._engine
        num_free = engine.config.max_num_requests - len(engine.running)
        groups = [*engine.running, *islice(engine.waiting, num_free)]
        new = [ongoing for group in groups if not (ongoing := self._ongoing[group.request.id]).has_begun]
        for ongoing in new:
            ongoing.has_begun = True
        if new:
            self._channel.send(Began([ongoing.frame.id for ongoing in new]))

    def _step(self) -> None:
        self._tell_begun()
        engine, start = self._engine, self._clock()
        before = engine.num_computed_tokens, engine.num_generated_tokens
        try:
            engine.step(self._max_tokens())
        except BaseException as error:
            if not (isinstance(error, Exception) or belongs_to_request(error)):
                raise
            self._fail_running(error)
        self._step_s = self._clock() - start
        num_computed, num_generated = engine.num_computed_tokens - before[0], engine.num_generated_tokens - before[1]
        self._budget.observe(max(0, num_computed - num_generated), 1000 * self._step_s)
        self._num_steps[bisect_left(STEP_TOKENS, num_computed)] += 1
        self._num_step_tokens += num_computed
        self._is_told = False
        for ongoing in list(self._ongoing.values()):
            self._report(ongoing, start)

    def _max_tokens(self) -> int | None:
        """Return the token budget of the next step, or None if prompts and generating sequences do not compete."""
        engine = self._engine
        needed = [s.num_uncomputed_tokens for group in engine.running for s in group.sequences]
        num_generating = needed.count(1)
        if num_generating == 0 or (num_generating == len(needed) and not engine.waiting):
            return None
        return self._budget.max_tokens(num_generating)

    def _fail_running(self, error: BaseException) -> None:
        """End the running requests. Accelerator errors are raised again: the engine cannot continue after them."""
        if isinstance(error, torch.AcceleratorError):
            raise error
        log.error("a step and its requests failed", exc_info=error)
        self._engine.fail_running(UserError("a step of the engine failed: the server's log says why"))

    def _report(self, ongoing: Ongoing, step_start_s: float) -> None:
        group = ongoing.group
        if group is None:
            return
        if ongoing.admitted_s is None and group.num_cached_tokens is not None:
            ongoing.admitted_s = step_start_s
        id = ongoing.frame.id
        for sample, completion in group.completions.items() if ongoing.streams else ():
            if sample not in ongoing.ended:  # a sample that restarts after a preemption ends a second time
                ongoing.ended.add(sample)
                self._gate.end(id, sample, completion.finish_reason.value, completion.stop_reason)
        if group.sequences:
            return
        output = group.output()
        if output.error is not None:
            self._gate.drop(id)
        elif not ongoing.streams:
            self._last += [Deltas([whole_delta(ongoing.request, *item)]) for item in enumerate(output.completions)]
        self._last.append(self._done(ongoing, output))
        self._num_preemptions += group.num_preemptions
        del self._ongoing[id]

    def _done(self, ongoing: Ongoing, output: Output) -> Done:
        start, first, error = ongoing.submitted_s, output.first_token_s, output.error
        admitted = output.finished_s if ongoing.admitted_s is None else ongoing.admitted_s
        prompt, num_top = ongoing.frame.prompt_token_ids, ongoing.request.params.prompt_logprobs
        pooler = self._pooler if isinstance(ongoing.frame, SubmitPooled) else None
        vector = None if pooler is None or error else pooler.values(output).tolist()
        return Done(
            ongoing.frame.id,
            output.num_prompt_tokens,
            output.num_cached_tokens,
            sum(len(completion.token_ids) for completion in output.completions),
            queue_s=admitted - start,
            first_token_s=None if first is None else first - start,
            total_s=output.finished_s - start,
            prompt_logprobs=None if num_top is None else told_logprobs(prompt[1:], output.prompt_logprobs, num_top),
            vector=vector,
            error=None if error is None else told_error(error, ongoing.frame.id),
        )

    def _flush(self) -> None:
        if self._channel.is_blocked:
            return
        if deltas := self._gate.take():
            self._channel.send(Deltas(deltas))
        while self._last:
            self._channel.send(self._last.popleft())
        now = self._clock()
        if not self._is_told and (not self._has_work or now - self._beat_s >= BEAT_S):
            self._beat_s, self._is_told = now, True
            self._channel.send(self._beat())

    def _beat(self) -> Beat:
        engine = self._engine
        groups = [*engine.running, *engine.waiting]
        return Beat(
            num_running=len(engine.running),
            num_waiting=len(engine.waiting) + len(self._background) + len(self._inbox),
            cache_usage=1 - engine.num_free_blocks / engine.requests.num_blocks,
            num_prompt_tokens=max(0, engine.num_computed_tokens - engine.num_generated_tokens),
            num_generated_tokens=engine.num_generated_tokens,
            num_preemptions=self._num_preemptions + sum(group.num_preemptions for group in groups),
            step_s=self._step_s,
            num_steps=list(self._num_steps),
            num_step_tokens=self._num_step_tokens,
        )


def told_logprobs(token_ids: list[int], steps: list[TokenLogprobs] | None, num_top: int | None) -> list[Logprob]:
    """Return the log probabilities of each token and of the `num_top` most likely; empty if none were requested."""
    if steps is None or num_top is None:
        return []
    return [told_logprob(token, step, num_top) for token, step in zip(token_ids, steps, strict=False)]


def told_logprob(token_id: int, step: TokenLogprobs, num_top: int) -> Logprob:
    """Return a token's log probability. `top` contains the token only if it is among the `num_top` most likely."""
    values = step.logprobs
    top = [token for token in values if token != token_id or len(values) <= num_top]
    top.sort(key=step.ranks.__getitem__)
    return Logprob(token_id, values[token_id], step.ranks[token_id], [(token, values[token]) for token in top])


def whole_delta(request: Request, sample: int, completion: Completion) -> Delta:
    """Return the single delta of a sample that is not streamed."""
    tokens, reason = completion.token_ids, completion.finish_reason.value
    logprobs = told_logprobs(tokens, completion.logprobs, request.params.logprobs)
    return Delta(request.id, sample, completion.text or "", tokens, logprobs, reason, completion.stop_reason)


def told_error(error: BaseException, id: int) -> str:
    """Return the error message for the client, in one line. Details of unexpected errors go only to the log."""
    if isinstance(error, UserError):
        return str(error)
    log.error("request %d failed", id, exc_info=error)
    return "the engine failed: the server's log says why"
