"""What a step computes, and the one form that every way to compute it has.

R output rows, E hidden channels, V tokens in the vocabulary, T tokens.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from models.batch import Batch


class StepOutputs(NamedTuple):
    """Results of a batch's output rows, in the model's dtype. The next step overwrites them."""

    hidden: Tensor
    """[R, E]"""
    logits: Tensor
    """[R, V]"""
    finite: Tensor
    """bool [R]: whether no logit of the row is NaN or infinite."""


Steps: TypeAlias = Callable[[Batch, Tensor | None], StepOutputs]
"""Computes a batch. The second argument, int64 [T] on the model's device, takes the place of the batch's token ids."""
