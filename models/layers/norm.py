"""Normalisation.

T tokens, E hidden channels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.layer_norm import layer_norm, layer_norm_quantize
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from models.layers.linear import Linear, shared_activations
from models.layers.linear_method import quantized_activations
from models.layers.module import Module


class LayerNorm(nn.LayerNorm, Module):
    """Subtract the mean of x [T, E], divide by the standard deviation, scale and shift (arXiv 1607.06450)."""

    readers: Sequence[Linear] = ()
    """As of `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        format = shared_activations(x.shape[0], self.readers)
        if format is None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        codes, scales = layer_norm_quantize(x, self.weight, self.bias, self.eps, *format)
        return quantized_activations(codes, scales, x.dtype, format.group_size)


class RMSNorm(Module):
    """The norm of x [T, E] (arXiv 1910.07467)."""

    readers: Sequence[Linear] = ()
    """The layers that alone read the norm: it has the activation format that they all expect, floats where they differ."""

    def __init__(self, size: int, eps: float, weight_offset: float | None = None) -> None:
        """`weight_offset` is added to the weight before it multiplies, as in `rms_norm`."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.weight_offset = eps, weight_offset

    def forward(self, x: Tensor) -> Tensor:
        return _norm(x, self.weight, self.eps, self.readers, self.weight_offset)


class ResidualStream(NamedTuple):
    """Hidden states x + update [T, E] between two layers. The norm that reads the sum next makes it."""

    x: Tensor
    update: Tensor | None = None

    def total(self) -> Tensor:
        return self.x if self.update is None else self.x + self.update


class AddRMSNorm(Module):
    """The norm of a residual stream, and the stream itself: both [T, E]."""

    readers: Sequence[Linear] = ()
    """As of `RMSNorm`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        if update is None:
            return _norm(x, self.weight, self.eps, self.readers), x
        format = shared_activations(x.shape[0], self.readers)
        if format is None:
            return add_rms_norm(update, x, self.weight, self.eps)
        codes, scales, total = add_rms_norm_quantize(update, x, self.weight, self.eps, *format)
        return quantized_activations(codes, scales, x.dtype, format.group_size), total


def _norm(
    x: Tensor, weight: Tensor, eps: float, readers: Sequence[Linear], weight_offset: float | None = None
) -> Tensor:
    format = shared_activations(x.shape[0], readers)
    if format is None:
        return rms_norm(x, weight, eps, weight_offset)
    codes, scales = rms_norm_quantize(x, weight, eps, *format, weight_offset)
    return quantized_activations(codes, scales, x.dtype, format.group_size)
