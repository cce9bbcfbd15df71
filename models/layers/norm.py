"""Normalisation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.quantize_rows import QuantizedRows, Rows
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from models.layers.linear import shared_row_codes
from models.layers.module import Module


class LayerNorm(nn.LayerNorm, Module):
    """Subtract the mean, divide by the standard deviation, scale and shift (arXiv 1607.06450)."""


class RMSNorm(nn.Module):
    """The norm of x [T, E], for the layers `into` to read."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, into: Sequence[nn.Module] = ()) -> Rows:
        """Quantised, if that is what all of `into` make of their rows."""
        return _norm(x, self.weight, self.eps, into)


class ResidualStream(NamedTuple):
    """Hidden states x + update [T, E] between two layers. The sum is left to the norm that reads it next, which makes it on its way."""

    x: Tensor
    update: Tensor | None = None

    def total(self) -> Tensor:
        return self.x if self.update is None else self.x + self.update


class AddRMSNorm(nn.Module):
    """The norm of a residual stream, for the layers `into` to read, and the stream itself: both [T, E]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, update: Tensor | None, into: Sequence[nn.Module] = ()) -> tuple[Rows, Tensor]:
        """The norm as of `RMSNorm`."""
        if update is None:
            return _norm(x, self.weight, self.eps, into), x
        codes = shared_row_codes(len(x), into)
        if codes is None:
            return add_rms_norm(update, x, self.weight, self.eps)
        normed, scales, total = add_rms_norm_quantize(update, x, self.weight, self.eps, codes.dtype, codes.group_size)
        return QuantizedRows(normed, scales, x.dtype, codes.group_size), total


def _norm(x: Tensor, weight: Tensor, eps: float, into: Sequence[nn.Module]) -> Rows:
    codes = shared_row_codes(len(x), into)
    if codes is None:
        return rms_norm(x, weight, eps)
    return QuantizedRows(*rms_norm_quantize(x, weight, eps, codes.dtype, codes.group_size), x.dtype, codes.group_size)
