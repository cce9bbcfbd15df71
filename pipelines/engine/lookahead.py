"""One step of lookahead: a GPU begins the next decode step while the CPU still learns what this one chose.

A step's tokens stay on the GPU and are the next one's inputs. Texts, stops and new requests come one step late, as the tokens do;
what was computed for a row that turns out to have stopped is dropped. All that steps read and write on a GPU is ordered by its
one stream, so blocks that are freed meanwhile may be given to others at once.
"""

import torch
from torch import Tensor

from pipelines.engine.logits import waits_for_tokens
from pipelines.engine.sampler import known_tokens
from pipelines.engine.scheduler import StepPlan
from pipelines.engine.steps import StepOutputs


class LaunchedStep:
    """A step that is being computed. S sequences of the plan, R output rows."""

    def __init__(self, plan: StepPlan, outputs: StepOutputs, tokens: Tensor | None = None) -> None:
        """`tokens` [S]: what the device chooses, one for each sequence; None where the CPU chooses."""
        self.plan = plan
        self.outputs = outputs
        self.tokens = tokens
        self._results = outputs.finite
        self._arrived: torch.cuda.Event | None = None
        if tokens is not None:
            self._results = torch.cat((outputs.finite.long(), tokens))
            if tokens.is_cuda:
                pinned = torch.empty(self._results.shape, dtype=torch.int64, pin_memory=True)
                self._results = pinned.copy_(self._results, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def is_wanted(self) -> bool:
        """Return whether a sequence of the plan has not ended since."""
        return any(item.sequence in item.group.sequences for item in self.plan.scheduled)

    def is_wanted_whole(self) -> bool:
        """Return whether no sequence of the plan has ended since."""
        return all(item.sequence in item.group.sequences for item in self.plan.scheduled)

    def wait(self) -> tuple[list[bool], list[int | None]]:
        """Return whether each of the R rows is finite, and the S tokens that the device chose, None where all were banned."""
        if self._arrived:
            self._arrived.synchronize()
        if self.tokens is None:
            return self._results.tolist(), []
        finite, tokens = self._results.split((len(self._results) - len(self.tokens), len(self.tokens)))
        return finite.bool().tolist(), known_tokens(tokens)


def can_choose_ahead(plan: StepPlan) -> bool:
    """Return whether the device can choose the tokens alone: from the logits, what the CPU knew before, and the last token.

    n-grams that may not repeat and bad words of several tokens are looked for on the CPU, in all tokens; searches and samples that fork,
    and log probabilities, are made there too. Their rows, and those beside them, wait for each step.
    """
    return len(plan.ready) == len(plan.scheduled) and all(
        item.group.search is None
        and item.sequence.params.n == 1
        and item.sequence.params.logprobs is None
        and item.sequence.params.prompt_logprobs is None
        and not waits_for_tokens(item.sequence)
        for item in plan.scheduled
    )
