"""Normalisation layers.

T tokens, E hidden channels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

import torch
from torch import Tensor, nn

from kernels.layer_norm import layer_norm, layer_norm_quantize
from kernels.quantize_rows import Activations, QuantizedActivations
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from models.layers.constant import Constant
from models.layers.linear import Linear, shared_activations
from models.layers.module import Module


class Norm(Module):
    """A norm of x [T, E]. `readers` are the only layers that read the result.

    The norm returns the activation format that all of them expect, else floats.
    """

    if TYPE_CHECKING:

        @overload
        def __call__(self, x: Tensor) -> Tensor: ...

        @overload
        def __call__(self, x: Tensor, readers: Sequence[Linear]) -> Activations: ...

        def __call__(self, x: Tensor, readers: Sequence[Linear] = ()) -> Activations: ...


class LayerNorm(nn.LayerNorm, Norm):
    """Layer normalisation with weight and bias (arXiv 1607.06450)."""

    def forward(self, x: Tensor, readers: Sequence[Linear] = ()) -> Activations:  # type: ignore[override]
        format = shared_activations(x.shape[0], readers)
        if format is None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        codes, scales = layer_norm_quantize(x, self.weight, self.bias, self.eps, *format)
        return QuantizedActivations(codes, scales, x.dtype, format.group_size)


class RMSNorm(Norm):
    """Root mean square normalisation (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, weight_offset: float | None = None) -> None:
        """`weight_offset` is added to the weight before the product, as in `rms_norm`."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.weight_offset = eps, weight_offset

    def forward(self, x: Tensor, readers: Sequence[Linear] = ()) -> Activations:
        return _norm(x, self.weight, self.eps, readers, self.weight_offset)


class WeightlessRMSNorm(Norm):
    """`RMSNorm` with weights of 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        dtypes = torch.float32, torch.bfloat16, torch.float16
        self._ones = {dtype: Constant(torch.ones(size, dtype=dtype, device="cpu")) for dtype in dtypes}

    def forward(self, x: Tensor, readers: Sequence[Linear] = ()) -> Activations:
        return _norm(x, self._ones[x.dtype].on(x.device), self.eps, readers, weight_offset=0.0)


class ResidualStream(NamedTuple):
    """Hidden states x + update [T, E] between two layers. The next norm computes the sum."""

    x: Tensor
    update: Tensor | None = None

    def total(self) -> Tensor:
        return self.x if self.update is None else self.x + self.update


class StreamWithInputs(NamedTuple):
    """Hidden states x [T, E] between two layers, with the inputs [T, L * P] that the L layers read in addition."""

    x: Tensor
    inputs: Tensor

    def total(self) -> Tensor:
        """Return both, [T, E + L * P]."""
        return torch.cat((self.x, self.inputs), dim=1)


class AddRMSNorm(Module):
    """Returns the norm of a residual stream, and the summed stream: both [T, E]. `readers`: as for `Norm`."""

    def __init__(self, size: int, eps: float, weight_offset: float | None = None, has_weight: bool = True) -> None:
        """`weight_offset`: as of `RMSNorm`. `has_weight`: false for a weight of ones, which checkpoints do not hold."""
        super().__init__()
        self.weight: nn.Parameter
        self.register_parameter("weight", nn.Parameter(torch.empty(size)) if has_weight else None)
        self._ones = None if has_weight else Constant(torch.ones(size, device="cpu"))
        self.eps, self.weight_offset = eps, weight_offset

    def forward(self, x: Tensor, update: Tensor | None, readers: Sequence[Linear] = ()) -> tuple[Activations, Tensor]:
        weight: Tensor = self.weight if self._ones is None else self._ones.on(x.device).to(x.dtype)
        if update is None:
            return _norm(x, weight, self.eps, readers, self.weight_offset), x
        format = shared_activations(x.shape[0], readers)
        if format is None:
            return add_rms_norm(update, x, weight, self.eps, self.weight_offset)
        codes, scales, total = add_rms_norm_quantize(update, x, weight, self.eps, *format, self.weight_offset)
        return QuantizedActivations(codes, scales, x.dtype, format.group_size), total


def _norm(
    x: Tensor, weight: Tensor, eps: float, readers: Sequence[Linear], weight_offset: float | None = None
) -> Activations:
    format = shared_activations(x.shape[0], readers)
    if format is None:
        return rms_norm(x, weight, eps, weight_offset)
    codes, scales = rms_norm_quantize(x, weight, eps, *format, weight_offset)
    return QuantizedActivations(codes, scales, x.dtype, format.group_size)
