"""Speculative decoding: which sequences get drafts, how many, and how many were accepted."""

import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from conf.speculation import Speculate
from pipelines.engine.draft_budget import DraftBudget
from pipelines.engine.proposers import Proposer
from pipelines.engine.proposers.ngram import NgramProposer
from pipelines.engine.request import Sequence, SequenceGroup
from pipelines.engine.scheduler import Scheduled, Scheduler, StepPlan


class Drafted(NamedTuple):
    """Drafts of a sequence in a plan. The number of accepted drafts is known when the next plan is made."""

    sequence: Sequence
    num_tokens: int
    """Length of the sequence before any draft was confirmed."""
    num_drafts: int

    @property
    def num_accepted(self) -> int:
        """Number of drafts that became tokens. The step also added one token after them."""
        return max(0, min(self.num_drafts, len(self.sequence.token_ids) - self.num_tokens - 1))


class DraftCounts(NamedTuple):
    """Numbers of drafted and accepted tokens."""

    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance(self) -> float | None:
        """Acceptance rate; None if there were no drafts."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else None

    def since(self, earlier: "DraftCounts") -> "DraftCounts":
        return DraftCounts(*(now - then for now, then in zip(self, earlier, strict=True)))


class Speculator:
    """Adds drafts to plans.

    A draft is accepted only if it equals the token chosen without it, so no draft changes a token.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self.proposers: dict[Speculate, Proposer] = {Speculate.ngram: NgramProposer()}
        self._budget = DraftBudget()
        self._drafted: list[Drafted] = []  # in the last plan
        self._measured: tuple[int, float] | None = None  # token count and start time of the running step
        self._settled = DraftCounts()

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts(
            self._settled.num_drafted_tokens + sum(drafted.num_drafts for drafted in self._drafted),
            self._settled.num_accepted_tokens + sum(drafted.num_accepted for drafted in self._drafted),
        )

    def wants_drafts(self, groups: list[SequenceGroup]) -> bool:
        return any(group.request.params.speculate is not Speculate.none for group in groups)

    def reads_hidden(self, plan: StepPlan) -> bool:
        """Return whether a proposer needs the hidden states of all tokens of the plan."""
        return any(self._reads_hidden(item) for item in plan.scheduled)

    def _reads_hidden(self, item: Scheduled) -> bool:
        proposer = self.proposers.get(item.sequence.params.speculate)
        return proposer is not None and proposer.reads_hidden and not item.group.search

    def observe(self, plan: StepPlan, hidden: Tensor) -> None:
        """Pass the hidden states [T, E] of all tokens of the step, with drafts, to the proposers that need them."""
        counts = [item.num_new_tokens + len(item.drafts) for item in plan.scheduled]
        parts = [part for part in zip(plan.scheduled, hidden.split(counts), strict=True) if self._reads_hidden(part[0])]
        for kind, proposer in self.proposers.items():
            if proposer_parts := [part for part in parts if part[0].sequence.params.speculate is kind]:
                proposer.observe(proposer_parts)

    def extend(self, plan: StepPlan, max_tokens: int | None = None) -> StepPlan:
        """Return the plan with drafts for the sequences that request drafts and get new tokens in this step.

        The caller has already copied the plan's blocks in the model's cache. `max_tokens`: the step's budget, as for
        `Scheduler.plan`.
        """
        self._settle()
        if all(item.sequence.params.speculate is Speculate.none for item in plan.scheduled):
            return plan
        for proposer in self.proposers.values() if plan.copies else ():
            proposer.copy_blocks(plan.copies)
        start = self._clock()  # before drafting, because the time of drafting is a cost of the step
        most = [_most(item) if item.group in plan.ready else 0 for item in plan.scheduled]
        if not any(most):
            return plan
        rows = [item.sequence for item in plan.scheduled]
        num_tokens = sum(item.num_new_tokens for item in plan.scheduled)
        lengths = self._budget.lengths(rows, most, num_tokens)
        decodes = all(item.start >= item.sequence.num_prompt_tokens for item in plan.scheduled)
        if any(lengths):
            reserved = self._scheduler.reserve(plan, lengths, max_tokens)
            drafts = self._propose([(row, count) for row, count in zip(rows, reserved, strict=True) if count])
            plan = plan._replace(scheduled=[i._replace(drafts=drafts.get(i.sequence, ())) for i in plan.scheduled])
            num_tokens += sum(map(len, drafts.values()))
        if decodes:
            self._measured = num_tokens, start
        return plan

    def sampled(self) -> None:
        """Record the time of the last plan's step, whose first tokens are sampled."""
        if self._measured:
            num_tokens, start = self._measured
            self._budget.costs.took(num_tokens, self._clock() - start)
            self._measured = None

    def learn(self, sequence: Sequence) -> None:
        if proposer := self.proposers.get(sequence.params.speculate):
            proposer.learn(sequence)

    def _propose(self, limits: list[tuple[Sequence, int]]) -> dict[Sequence, tuple[int, ...]]:
        drafts = {}
        for kind, proposer in self.proposers.items():
            sequences = [(sequence, most) for sequence, most in limits if sequence.params.speculate is kind]
            for (sequence, most), draft in zip(
                sequences, proposer.propose(sequences) if sequences else [], strict=True
            ):
                if draft:
                    drafts[sequence] = tuple(draft[:most])
                    self._drafted.append(Drafted(sequence, len(sequence.token_ids), len(drafts[sequence])))
        return drafts

    def _settle(self) -> None:
        """Record acceptance when no confirmed step is pending."""
        self._settled, self._measured = self.counts, None
        for drafted in self._drafted:
            self._budget.learn(drafted.sequence, drafted.num_accepted, drafted.num_drafts)
        self._drafted.clear()


def _most(item: Scheduled) -> int:
    params, group = item.sequence.params, item.group
    if params.speculate is Speculate.none or group.search or not item.sequence.num_output_tokens:
        return 0
    return params.speculation.num_tokens
