"""Pooling: turns a prompt's outputs into one vector. The request generates no tokens.

Dimensions: R output rows, E hidden channels, O outputs of the model's head: its vocabulary, its labels, or the hidden
channels if the model has no head.
"""

import torch
from torch import Tensor

from pipelines.engine.request import Continuation, Pooling, Sequence, SequenceGroup


class PromptPooling:
    """Ends a group when its prompt is computed, with the float32 vector `group.pooled`.

    The vector is the head's outputs [O] for the last token, the hidden state [E] of the first token, or the mean [E] of
    all hidden states. The mean is summed in float64 from the first token to the last, so that prompt chunks do not
    change it.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._begin()

    def _begin(self) -> None:
        self._num_observed = 0
        self._sum: Tensor | None = None  # float64 [E]

    def observe(self, hidden: Tensor) -> None:
        if self._pooling is Pooling.last or (self._pooling is Pooling.cls and self._num_observed):
            return
        rows = hidden[:1] if self._pooling is Pooling.cls else hidden
        for row in rows.to("cpu", torch.float64):
            self._sum = row.clone() if self._sum is None else self._sum.add_(row)
        self._num_observed += len(rows)

    def advance(self, group: SequenceGroup, logits: Tensor) -> list[Continuation]:
        pooled = logits[0] if self._sum is None else self._sum / self._num_observed
        group.pooled = pooled.to("cpu", torch.float32)
        return []

    def restart(self, group: SequenceGroup) -> Sequence:
        self._begin()
        return group.origin.fork()

    def recompute(self, group: SequenceGroup) -> None:
        raise AssertionError("a pooled prompt does not grow, so it cannot cross long_rope_threshold")
