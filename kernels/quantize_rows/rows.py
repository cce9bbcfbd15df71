"""Rows whose numbers are codes. M rows, K inputs of a product."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class ActivationFormat(NamedTuple):
    """Codes that rows are quantised to before a product, with a scale for each row, for each group of its inputs, or for each expert."""

    dtype: torch.dtype
    """int8 or float8_e4m3fn"""
    group_size: int | None = None
    static_scales: Tensor | None = None
    """float32 that were chosen before: one, or one for each expert."""


@dataclass(frozen=True)
class QuantizedActivations:
    """Rows that were quantised: codes * scales."""

    codes: Tensor
    """int8 or float8_e4m3fn [M, K]"""
    scales: Tensor
    """float32 [M, 1], or [1, 1] for all rows, or [M, K / group_size rounded up]."""
    dtype: torch.dtype
    """Of products with them."""
    group_size: int | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def is_cpu(self) -> bool:
        return self.codes.is_cpu

    def __len__(self) -> int:
        return len(self.codes)


Rows: TypeAlias = Tensor | QuantizedActivations
"""What a weight is multiplied by."""
