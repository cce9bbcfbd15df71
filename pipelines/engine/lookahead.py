"""One step of lookahead: a GPU begins the next decode step while the CPU still learns what this one chose.

A step's tokens stay on the GPU and are the next one's inputs. Texts, stops and new requests come one step late, as the tokens do; of a
row that turns out to have stopped, what was computed after it is dropped. All that steps read and write on a GPU is ordered by its
one stream, so blocks that are freed meanwhile may be given to others at once.
"""

import torch
from torch import Tensor

from conf.errors import UserError
from pipelines.engine.batch import build_batch
from pipelines.engine.logits import waits_for_tokens
from pipelines.engine.request import Sequence, SequenceGroup
from pipelines.engine.runner import Runner, check_finite
from pipelines.engine.sampler import choose, known_token
from pipelines.engine.scheduler import Scheduled, Scheduler, StepPlan


class LaunchedStep:
    """A step whose tokens [S], one for each sequence of the plan, are being computed."""

    def __init__(self, plan: StepPlan, tokens: Tensor, finite: Tensor) -> None:
        self.plan = plan
        self.tokens = tokens
        self._results = torch.cat((tokens, finite.long()[None]))
        self._arrived: torch.cuda.Event | None = None
        if tokens.is_cuda:
            pinned = torch.empty(self._results.shape, dtype=torch.int64, pin_memory=True)
            self._results = pinned.copy_(self._results, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def alive(self) -> list[Scheduled]:
        """What was planned for sequences that have not ended since."""
        return [item for item in self.plan.scheduled if item.sequence in item.group.sequences]

    def wait(self) -> dict[Sequence, int | None]:
        """Each sequence's token, None where all were banned. Raises UserError where a logit was not finite."""
        if self._arrived:
            self._arrived.synchronize()
        *tokens, finite = self._results.tolist()
        check_finite(bool(finite))
        return {item.sequence: known_token(token) for item, token in zip(self.plan.scheduled, tokens, strict=True)}


class Lookahead:
    """Steps whose tokens the GPU chooses alone: from the logits, what the CPU knew before, and the last token.

    n-grams that may not repeat and bad words of several tokens are looked for on the CPU, in all tokens; searches and samples that fork,
    and log probabilities, are made there too. Their rows, and those beside them, wait for each step."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._next: LaunchedStep | None = None

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan is such a step, and computes the last token of everyone who runs."""
        return len(plan.ready) == len(plan.scheduled) and all(
            item.group.search is None
            and item.sequence.request.params.n == 1
            and item.sequence.request.params.logprobs is None
            and item.sequence.request.params.prompt_logprobs is None
            and not waits_for_tokens(item.sequence)
            for item in plan.scheduled
        )

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin a step that `fits`."""
        step = self._launch(plan)
        self._scheduler.commit(plan)
        return step

    def take(self) -> LaunchedStep | None:
        """The step that was begun ahead, if anybody still waits for it."""
        step, self._next = self._next, None
        if step is None or not (alive := step.alive()):
            return None
        self._scheduler.commit(step.plan._replace(scheduled=alive))  # now the tokens that it computed are known
        return step

    def results(self, step: LaunchedStep) -> list[tuple[SequenceGroup, Sequence, int | None]]:
        """The tokens of those who have not ended, None where all were banned.

        Before it waits for them, the step after this one is begun, if none has ended.

        Raises UserError where a logit was not finite.
        """
        alive = step.alive()
        ahead = self._scheduler.plan_ahead(step.plan) if len(alive) == len(step.plan.scheduled) else None
        self._next = None if ahead is None else self._launch(ahead, step.tokens.clamp(min=0))
        try:
            tokens = step.wait()
        except UserError:
            self._next = None
            raise
        return [(item.group, item.sequence, tokens[item.sequence]) for item in alive]

    def _launch(self, plan: StepPlan, token_ids: Tensor | None = None) -> LaunchedStep:
        """`token_ids` [S]: the inputs, where only the device knows them."""
        batch = build_batch(plan, self._scheduler.block_manager.block_size)
        _, logits, finite = self._runner.launch(batch, token_ids)
        sequences = [item.sequence for item in plan.scheduled]
        return LaunchedStep(plan, choose(logits, sequences, token_ids), finite)
