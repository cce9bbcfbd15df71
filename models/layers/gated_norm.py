"""The modules that join the outputs of Mamba-2's heads and the gate.

R output rows, H heads of D channels.
"""

import torch
from torch import Tensor, nn

from kernels.gated_rms_norm import gated_rms_norm
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu
from models.layers.module import Module


class GatedRMSNorm(Module):
    """The norm of x * silu(gate), for each group of channels apart."""

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.group_size, self.eps = size // num_groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate and the result are [R, H * D]."""
        return gated_rms_norm(x, gate, self.weight, self.group_size, self.eps)


class NormThenGate(GatedRMSNorm):
    """norm(x) * silu(gate), for each group of channels apart."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        num_groups = len(self.weight) // self.group_size
        groups = zip(x.chunk(num_groups, 1), self.weight.chunk(num_groups), strict=True)
        normed = torch.cat([rms_norm(part, weight, self.eps) for part, weight in groups], 1)
        return swiglu(gate, normed)


class OnlyGate(Module):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x * silu(gate). x, gate and the result are [R, H * D]."""
        return swiglu(gate, x)
