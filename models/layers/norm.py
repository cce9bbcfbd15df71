"""Normalisation layers.

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
    """Layer normalisation of x [T, E] with weight and bias (arXiv 1607.06450)."""

    readers: Sequence[Linear] = ()
    """As in `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        format = shared_activations(x.shape[0], self.readers)
        if format is None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        codes, scales = layer_norm_quantize(x, self.weight, self.bias, self.eps, *format)
        return quantized_activations(codes, scales, x.dtype, format.group_size)


class RMSNorm(Module):
    """Root mean square normalisation of x [T, E] (arXiv 1910.07467)."""

    readers: Sequence[Linear] = ()
    """The only layers that read the output.

    The norm returns the activation format that all of them expect, else floats.
    """

    def __init__(self, size: int, eps: float, weight_offset: float | None = None) -> None:
        """`weight_offset` is added to the weight before the product, as in `rms_norm`."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.weight_offset = eps, weight_offset

    def forward(self, x: Tensor) -> Tensor:
        return _norm(x, self.weight, self.eps, self.readers, self.weight_offset)


class ResidualStream(NamedTuple):
    """Hidden states x + update [T, E] between two layers. The next norm computes the sum."""

    x: Tensor
    update: Tensor | None = None

    def total(self) -> Tensor:
        return self.x if self.update is None else self.x + self.update


class AddRMSNorm(Module):
    """Returns the norm of a residual stream, and the summed stream: both [T, E]."""

    readers: Sequence[Linear] = ()
    """As in `RMSNorm`."""

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
