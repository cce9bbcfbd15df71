"""Steps whose outputs are computed, or will be, before the tokens that go into them are known.

One step of lookahead: a GPU begins the next decode step while the CPU still learns what this one chose. A step's tokens stay on the GPU
and are the next one's inputs. Texts, stops and new requests come one step late, as the tokens do; what was computed for a row that turns
out to have stopped is dropped. All that steps read and write on a GPU is ordered by its one stream, so blocks that are freed meanwhile may
be given to others at once.

A step with drafts holds the next steps' outputs for as long as the drafts turn out to be the tokens that are chosen.
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
    """A step that is being computed. S sequences of the plan, R output rows."""

    def __init__(self, plan: StepPlan, outputs: StepOutputs, tokens: Tensor | None = None) -> None:
        """`tokens` [S]: what the device chooses, one for each sequence; None where the CPU chooses."""
        self.plan = plan
        self.outputs = outputs
        self.tokens = tokens
        self.first_rows = _first_rows(plan)
        """The first output row of each of the plan's items, which has as many as it has outputs; its drafts' rows follow."""
        self.given: dict[tuple[Sequence, int], int | None] = {}
        """Tokens that are chosen already, by sequence and the number of its tokens before."""
        self.is_confirmed = False
        """Whether nothing is computed for it, because it is the rest of a step whose drafts were right."""
        self._results = outputs.finite
        self._arrived: torch.cuda.Event | None = None
        if tokens is not None:
            self._results = torch.cat((outputs.finite.long(), tokens))
            if tokens.is_cuda:
                pinned = torch.empty(self._results.shape, dtype=torch.int64, pin_memory=True)
                self._results = pinned.copy_(self._results, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def give(self, index: int, tokens: list[int | None]) -> None:
        """Let the plan's item of this index have these next tokens: its first drafts, and one after them."""
        item = self.plan.scheduled[index]
        before = len(item.sequence.token_ids)
        self.given |= {(item.sequence, before + i): token for i, token in enumerate(tokens)}
        self.plan.scheduled[index] = item._replace(drafts=item.drafts[: len(tokens) - 1])

    def has_live_sequences(self) -> bool:
        """Return whether a sequence of the plan has not ended since."""
        return any(item.sequence in item.group.sequences for item in self.plan.scheduled)

    def all_sequences_live(self) -> bool:
        """Return whether no sequence of the plan has ended since."""
        return all(item.sequence in item.group.sequences for item in self.plan.scheduled)

    def confirmed(self) -> "LaunchedStep | None":
        """Return the next step, whose outputs are there already: of sequences that have grown by what was drafted for them."""
        grown = [
            (_without_first_draft(item), row + item.num_outputs)
            for item, row in zip(self.plan.scheduled, self.first_rows, strict=True)
            if item.drafts and item.sequence in item.group.sequences and item.sequence.token_ids[-1] == item.drafts[0]
        ]
        if not grown:
            return None
        scheduled, first_rows = map(list, zip(*grown, strict=True))
        step = copy.copy(self)
        step.plan = StepPlan(scheduled, list(dict.fromkeys(item.group for item in scheduled)), [])
        step.first_rows = first_rows
        step.is_confirmed = True
        return step

    def wait(self) -> tuple[list[bool], list[int | None]]:
        """Return whether each of the R rows is finite, and the S tokens that the device chose, None where all were banned."""
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
    """Return what is scheduled where the first draft is a token of the sequence."""
    after = item.start + item.num_new_tokens
    return item._replace(start=after, num_new_tokens=1, num_outputs=1, drafts=item.drafts[1:])


def can_choose_ahead(plan: StepPlan) -> bool:
    """Return whether the device can choose the tokens alone: from the logits, what the CPU knew before, and the last token.

    n-grams that may not repeat and bad words of several tokens are looked for on the CPU, in all tokens; guides, searches and samples
    that fork, and log probabilities, are made there too; drafts follow the tokens. Their rows, and those beside them, wait for each step.
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
