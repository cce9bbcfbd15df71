"""Normalisation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.quantize_rows import QuantizedRows, Rows
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from models.layers.linear import shared_row_codes


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


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
        """The rows are the codes that `into` would make of them, if these are the same for all of them."""
        wanted = shared_row_codes(len(x), into)
        if wanted is None:
            if update is None:
                return rms_norm(x, self.weight, self.eps), x
            return add_rms_norm(update, x, self.weight, self.eps)
        if update is None:
            codes, scales = rms_norm_quantize(x, self.weight, self.eps, *wanted)
        else:
            codes, scales, x = add_rms_norm_quantize(update, x, self.weight, self.eps, *wanted)
        return QuantizedRows(codes, scales, x.dtype, wanted.group_size), x
