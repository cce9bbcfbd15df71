"""The outputs of a step, and the common signature of all ways to compute it.

Dimensions: R output rows, E hidden channels, V vocabulary entries, T tokens.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from models.batch import Batch


class StepOutputs(NamedTuple):
    """Outputs of a batch's output rows, in the model's dtype. The next step overwrites them."""

    hidden: Tensor
    """[R, E]"""
    logits: Tensor
    """[R, V]"""
    finite: Tensor
    """bool [R]: whether all logits of the row are finite."""


Steps: TypeAlias = Callable[[Batch, Tensor | None], StepOutputs]
"""Computes a batch. The second argument, int64 [T] on the model's device, replaces the batch's token ids."""
