"""Normalisation."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.rms_norm import add_rms_norm, rms_norm


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
    """The norm of a residual stream, and the stream itself: both [T, E]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        if update is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(update, x, self.weight, self.eps)
