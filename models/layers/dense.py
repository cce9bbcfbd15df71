"""Linear layers whose float weights are held in the order in which the CPU's kernels read them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels.linear import FloatWeight, WeightGroup, grouped_matmul, matmul, matmul_swiglu, matmul_together, pack
from kernels.quantize_rows import Rows
from models.layers.linear import GroupedProduct, JointLinear, Layer, take


class DenseLinear(JointLinear):
    """x [R, I] -> [R, O]. The packed weight takes the place of the checkpoint's."""

    from_floats = True

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.source = layer.source
        self._layer = layer
        self.bias: nn.Parameter | None = None  # [O]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        (outputs, inputs), bias = self._layer.shape, {"bias": (self._layer.shape[0],)} if self._layer.has_bias else {}
        return {"weight": (inputs, outputs) if self._layer.is_transposed else (outputs, inputs), **bias}

    def num_bytes(self, dtype: torch.dtype) -> int:
        return sum(math.prod(shape) for shape in self.tensors().values()) * dtype.itemsize

    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        weight = tensors["weight"].to(dtype)
        bias = tensors["bias"].to(dtype, copy=True) if self._layer.has_bias else None
        self._hold(pack(weight.T if self._layer.is_transposed else weight), bias)

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        weight = FloatWeight(tensors.pop("tiles"), *self._layer.shape)
        if weight.dtype != dtype:
            raise ValueError(f"packed weights of {weight.dtype}, not {dtype}")
        weight.check()
        self._hold(weight, take(tensors, "bias", self._layer.shape[:1], dtype) if self._layer.has_bias else None)

    def _hold(self, weight: FloatWeight, bias: Tensor | None) -> None:
        self._weight = weight
        self.kind = weight.dtype
        self.tiles = nn.Parameter(weight.memory, requires_grad=False)  # the same memory, so that it is counted
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """[O, I], a copy."""
        return self._weight.unpack()

    def forward(self, x: Tensor) -> Tensor:
        return matmul(x, self._weight, self.bias)

    def multiply_together(self, x: Rows, layers: Sequence["DenseLinear"]) -> list[Tensor]:
        assert isinstance(x, Tensor)
        return matmul_together(x, [layer._weight for layer in layers], [layer.bias for layer in layers])

    def multiply_swiglu(self, x: Rows, up: "DenseLinear") -> Tensor:
        assert isinstance(x, Tensor)
        return matmul_swiglu(x, self._weight, up._weight, self.bias, up.bias)

    @classmethod
    def grouped(cls, layers: Sequence["DenseLinear"], ups: Sequence["DenseLinear"] | None = None) -> GroupedProduct:
        weights = WeightGroup([layer._weight for layer in layers])
        gated = None if ups is None else WeightGroup([up._weight for up in ups])
        return lambda x, starts: grouped_matmul(x, weights, starts, gated)
