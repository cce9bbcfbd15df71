"""Launched steps. A step can be launched, and even complete, before its input tokens are known on the CPU.

The engine looks ahead by one step: a GPU begins the next decode step while the CPU still receives this step's tokens.
The tokens stay on the GPU as the next step's inputs. Texts, stops and new requests are handled one step late, and
results for a row that has stopped are dropped. One stream orders all GPU reads and writes of the steps, so blocks that
are freed meanwhile can be reused at once.

A step with drafts contains the outputs of the next steps, as long as the drafts equal the chosen tokens.
"""

import copy
import itertools

import torch
from torch import Tensor

from conf.speculation import Speculate
from pipelines.engine.logits import waits_for_tokens
from pipelines.engine.request import Sequence
from pipelines.engine.sampler import known_tokens
from pipelines.engine.scheduler import Scheduled, StepPlan
from pipelines.engine.steps import StepOutputs


class LaunchedStep:
    """A step in progress. S sequences of the plan, R output rows."""

    def __init__(self, plan: StepPlan, outputs: StepOutputs, tokens: Tensor | None = None) -> None:
        """`tokens` [S]: the tokens that the device chooses, one per sequence; None if the CPU chooses."""
        self.plan = plan
        self.outputs = outputs
        self.tokens = tokens
        self.first_rows = _first_rows(plan)
        """Index of each item's first output row. An item has `num_outputs` rows, followed by the rows of its drafts."""
        self.fixed_tokens: dict[tuple[Sequence, int], int | None] = {}
        """Tokens that are chosen already, by sequence and position in the sequence."""
        self.is_confirmed = False
        """Whether the step needs no computation, because an earlier step's accepted drafts have its outputs."""
        self._results = outputs.finite
        self._arrived: torch.cuda.Event | None = None
        if tokens is not None:
            self._results = torch.cat((outputs.finite.long(), tokens))
            if tokens.is_cuda:
                pinned = torch.empty(self._results.shape, dtype=torch.int64, pin_memory=True)
                self._results = pinned.copy_(self._results, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def fix_tokens(self, index: int, tokens: list[int | None]) -> None:
        """Fix the next tokens of the plan's item `index`: its accepted drafts, and one token after them."""
        item = self.plan.scheduled[index]
        before = len(item.sequence.token_ids)
        self.fixed_tokens |= {(item.sequence, before + i): token for i, token in enumerate(tokens)}
        self.plan.scheduled[index] = item._replace(drafts=item.drafts[: len(tokens) - 1])

    def has_live_sequences(self) -> bool:
        return any(item.sequence in item.group.sequences for item in self.plan.scheduled)

    def all_sequences_live(self) -> bool:
        return all(item.sequence in item.group.sequences for item in self.plan.scheduled)

    def confirmed(self) -> "LaunchedStep | None":
        """Return the next step, whose outputs are already computed; None if there is none.

        It contains the sequences whose first draft became their last token.
        """
        grown = [
            (_without_first_draft(item), row + item.num_outputs)
            for item, row in zip(self.plan.scheduled, self.first_rows, strict=True)
            if item.drafts and item.sequence in item.group.sequences and item.sequence.token_ids[-1] == item.drafts[0]
        ]
        if not grown:
            return None
        scheduled, first_rows = map(list, zip(*grown, strict=True))
        step = copy.copy(self)
        step.plan = StepPlan(scheduled, list(dict.fromkeys(item.group for item in scheduled)), [], [])
        step.first_rows = first_rows
        step.is_confirmed = True
        return step

    def wait(self) -> tuple[list[bool], list[int | None]]:
        """Return whether each of the R rows is finite, and the S tokens of the device (None: all were banned)."""
        if self._arrived:
            self._arrived.synchronize()
        if self.tokens is None:
            return self._results.tolist(), []
        finite, tokens = self._results.split((len(self._results) - len(self.tokens), len(self.tokens)))
        return finite.bool().tolist(), known_tokens(tokens)


def _first_rows(plan: StepPlan) -> list[int]:
    num_rows = (item.num_outputs + len(item.drafts) for item in plan.scheduled)
    return [0, *itertools.accumulate(num_rows)][:-1]


def _without_first_draft(item: Scheduled) -> Scheduled:
    after = item.start + item.num_new_tokens
    return item._replace(start=after, num_new_tokens=1, num_outputs=1, drafts=item.drafts[1:], state_slots=None)


def can_choose_ahead(plan: StepPlan) -> bool:
    """Return whether the device can choose the tokens from the logits, the last token and what the CPU already has.

    The CPU needs each step's tokens for n-grams that must not repeat, bad words of several tokens, guides, reasoning at
    its limit, searches, samples that fork, log probabilities, and drafts. If one row needs them, all rows of the step wait.
    """
    return len(plan.ready) == len(plan.scheduled) and all(
        item.group.search is None
        and item.sequence.params.n == 1
        and item.sequence.params.logprobs is None
        and item.sequence.params.prompt_logprobs is None
        and item.sequence.params.speculate is Speculate.none
        and not waits_for_tokens(item.sequence)
        for item in plan.scheduled
    )
