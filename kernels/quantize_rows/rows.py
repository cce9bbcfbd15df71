"""Quantised activations. M rows, K inputs of a product."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class ActivationFormat(NamedTuple):
    """The format of activations that are quantised before a product: one scale per row, per group of its inputs, or per
    expert."""

    dtype: torch.dtype
    """int8 or float8_e4m3fn."""
    group_size: int | None = None
    static_scales: Tensor | None = None
    """float32: one, or one per expert."""


@dataclass(frozen=True)
class QuantizedActivations:
    """Quantised rows of activations: codes * scales."""

    codes: Tensor
    """int8 or float8_e4m3fn [M, K]."""
    scales: Tensor
    """float32 [M, 1], [1, 1] for all rows, or [M, ceil(K / group_size)]."""
    dtype: torch.dtype
    """The dtype of products with these rows."""
    group_size: int | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def is_cpu(self) -> bool:
        return self.codes.is_cpu

    def __len__(self) -> int:
        return len(self.codes)


Activations: TypeAlias = Tensor | QuantizedActivations
"""The left operand of a product."""
