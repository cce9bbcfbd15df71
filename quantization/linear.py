"""Linear layers whose weights, and where wanted activations, are codes.

R rows, I input channels, O output channels, G groups of input channels.
"""

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn

from conf.errors import UserError
from conf.quantization import Activations
from kernels.linear import (
    Float8Weight,
    GPUWeight,
    IntWeight,
    WeightGroup,
    grouped_matmul,
    linear,
    matmul,
    matmul_swiglu,
    matmul_together,
    pack_codes,
    pack_float8,
)
from kernels.quantize_rows import QuantizedRows, RowCodes, Rows, quantize_rows
from models.layers.linear import GPULinear, GroupedProduct, JointLinear, PackedLinear, take
from quantization.activations import quantize_static
from quantization.layouts.base import StoredWeight, WeightLayout
from quantization.layouts.floats import FloatLayout
from quantization.scheme import LinearScheme

# Rows from which activations=auto quantises. One limb is faster than two from 5 rows on with int8 weights and from 3 with int4 (one thread;
# with more the memory is slower to keep up), 1.4 to 1.9 times with 8.
MANY_ROWS = 8

KernelWeight: TypeAlias = IntWeight | Float8Weight | GPUWeight


class CodedLinear(PackedLinear):
    """Layers of any scheme: what they are made of, and what their inputs go through before the product."""

    def __init__(
        self, source: str, scheme: LinearScheme, layout: WeightLayout, shape: tuple[int, int], has_bias: bool
    ) -> None:
        super().__init__()
        self.source = source
        self.from_floats = isinstance(layout, FloatLayout)
        self.scheme = scheme
        self._layout = layout
        self._shape = shape  # [O, I]
        self._bias_shape = {"bias": shape[:1]} if has_bias else {}
        self.bias: nn.Parameter | None = None
        self.permutation: Tensor | None  # [I] int64
        self.input_scale: Tensor | None  # float32 scalar
        self.register_buffer("permutation", None)
        self.register_buffer("input_scale", None)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self._layout.tensors() | self._bias_shape

    def num_bytes(self, dtype: torch.dtype) -> int:
        bias = self._shape[0] * dtype.itemsize if self._bias_shape else 0
        return bias + self.scheme.weights.num_bytes(*self._shape)

    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        bias = tensors.pop("bias") if self._bias_shape else None
        try:
            stored = self._layout.read(tensors)
        except UserError as error:
            raise UserError(f"{self.source}: {error}") from error
        self.hold(stored, bias, dtype, device)

    def hold(self, stored: StoredWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameters of a weight that is quantised, and of the bias [O]."""
        self.bias = None if bias is None else nn.Parameter(bias.to(device, dtype, copy=True), requires_grad=False)
        permutation, input_scale = stored.weight.permutation, stored.input_scale
        self.permutation = None if permutation is None else permutation.to(device)
        self.input_scale = None if input_scale is None else input_scale.to(device, torch.float32)
        self._hold(stored, dtype, device)

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        for name, shape in self._bias_shape.items():
            self.bias = nn.Parameter(take(tensors, name, shape, dtype), requires_grad=False)
        if self.scheme.activations is Activations.static:
            self.input_scale = take(tensors, "input_scale", (), torch.float32)
        self._restore(tensors, dtype)

    @abstractmethod
    def _hold(self, stored: StoredWeight, dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameters of the weight."""

    @abstractmethod
    def _restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Take them, and the permutation, out of `tensors`."""

    def _register(self, tensors: dict[str, Tensor]) -> None:
        """Make them parameters: the same memory as the kernels read, so that it is counted."""
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @abstractmethod
    def _multiply(self, x: Rows) -> Tensor:
        """x [R, I] times the weight transposed: [R, O] in x's dtype."""

    def forward(self, x: Rows) -> Tensor:
        if self.permutation is not None:
            assert isinstance(x, Tensor)
            x = x[:, self.permutation]
        y = self._multiply(x)  # [R, O]
        return y if self.bias is None else y + self.bias


class KernelLinear(CodedLinear, GPULinear):
    """One whose codes the kernels multiply by, in a form of the machine's."""

    _weight: KernelWeight

    @property
    def expert_kind(self) -> Hashable:
        """None on a CPU, and for a layer that permutes rows as others do not."""
        is_one = isinstance(self._weight, GPUWeight) and self.permutation is None and self.bias is None
        return (self.scheme, self.gpu_weight.format) if is_one else None

    def _restore_permutation(self, tensors: dict[str, Tensor]) -> None:
        if self.from_floats or "permutation" not in tensors:
            return
        num_inputs = self._shape[1]
        self.permutation = take(tensors, "permutation", (num_inputs,), torch.int64)
        if not self.permutation.sort().values.equal(torch.arange(num_inputs)):
            raise ValueError(f"its permutation does not name each of {num_inputs} inputs once")

    @property
    def row_scale(self) -> Tensor | None:
        return self.input_scale

    @abstractmethod
    def _codes(self, num_rows: int, num_layers: int) -> RowCodes | None:
        """What rows become before the product, also where other layers would make other codes of them."""

    def row_codes(self, num_rows: int, num_layers: int = 1, row_scales: Tensor | None = None) -> RowCodes | None:
        codes = self._codes(num_rows, num_layers)
        if codes is None or self.permutation is not None:
            return None
        if self.input_scale is None:
            return codes
        return None if row_scales is None else codes._replace(static_scales=row_scales)

    def _rows(self, x: Rows, num_layers: int = 1) -> Rows:
        """What the weight is multiplied by, where so many layers divide the rows among them."""
        codes = None if isinstance(x, QuantizedRows) else self._codes(len(x), num_layers)
        if codes is None:
            return x
        assert isinstance(x, Tensor)
        if self.input_scale is None:
            return QuantizedRows(*quantize_rows(x, *codes), x.dtype, codes.group_size)
        kind = self.scheme.weights.kind
        return QuantizedRows(quantize_static(x, self.input_scale, kind), self.input_scale.reshape(1, 1), x.dtype)

    def _multiply(self, x: Rows) -> Tensor:
        return matmul(self._rows(x), self._weight)

    @property
    def input_kind(self) -> Hashable:
        """None on a CPU, and for a layer that permutes its rows. One that has a scale for them meets others that have the same."""
        if not isinstance(self._weight, GPUWeight) or self.permutation is not None:
            return None
        scale = None if self.input_scale is None else self.input_scale.item()
        return self.scheme, scale, self.gpu_weight.output_format

    @property
    def gpu_weight(self) -> GPUWeight:
        assert isinstance(self._weight, GPUWeight)
        return self._weight

    def keep(self, weight: KernelWeight) -> None:
        self._weight = weight
        self._register(weight.tensors)

    def with_weight(self, weight: GPUWeight, bias: nn.Parameter | None) -> Self:
        shape = weight.num_outputs, weight.num_inputs
        layer = type(self)(self.source, self.scheme, self._layout, shape, bias is not None)
        layer.keep(weight)
        layer.bias, layer.input_scale = bias, self.input_scale
        return layer


class IntLinear(KernelLinear, JointLinear):
    """4- or 8-bit integer weights, packed once for the machine; activations floats or 8-bit integers."""

    _weight: IntWeight | GPUWeight

    def _hold(self, stored: StoredWeight, dtype: torch.dtype, device: torch.device) -> None:
        w = stored.weight
        zero_points = None if w.zero_points is None else w.zero_points.to(device)
        self.keep(pack_codes(w.codes.to(device), w.scales.to(device), zero_points, self.scheme.weights.bits))

    def _restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._restore_permutation(tensors)
        w = self.scheme.weights
        size = w.group_size or self._shape[1]
        self.keep(IntWeight(tensors.pop("packed"), *self._shape, size, w.bits, has_zero_points=not w.symmetric))

    def keep(self, weight: KernelWeight) -> None:
        super().keep(weight)
        if isinstance(weight, IntWeight) and self.permutation is None and self.input_scale is None:
            self.kind = self.scheme.activations, weight.format

    def _codes(self, num_rows: int, num_layers: int) -> RowCodes | None:
        activations = self.scheme.activations
        if activations is Activations.none or activations is Activations.auto and num_rows < MANY_ROWS * num_layers:
            return None
        return RowCodes(torch.int8)

    def multiply_together(self, x: Rows, layers: Sequence["IntLinear"]) -> list[Tensor]:
        weights, biases = [layer._packed for layer in layers], [layer.bias for layer in layers]
        return matmul_together(self._rows(x), weights, biases)

    def multiply_swiglu(self, x: Rows, up: "IntLinear") -> Tensor:
        return matmul_swiglu(self._rows(x), self._packed, up._packed, self.bias, up.bias)

    @property
    def _packed(self) -> IntWeight:
        """Of a layer with a `kind`."""
        assert isinstance(self._weight, IntWeight)
        return self._weight

    @classmethod
    def grouped(cls, layers: Sequence["IntLinear"], ups: Sequence["IntLinear"] | None = None) -> GroupedProduct:
        first, weights = layers[0], WeightGroup([layer._packed for layer in layers])
        gated = None if ups is None else WeightGroup([up._packed for up in ups])
        return lambda x, starts: grouped_matmul(first._rows(x, len(layers)), weights, starts, gated)


class Fp8Linear(KernelLinear):
    """float8 weights; activations floats or float8, with a scale for each token, or for each group of it where weights have groups."""

    _weight: Float8Weight | GPUWeight

    def _hold(self, stored: StoredWeight, dtype: torch.dtype, device: torch.device) -> None:
        self.keep(pack_float8(stored.weight.codes.to(device), stored.weight.scales.to(device)))

    def _restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._restore_permutation(tensors)
        (outputs, inputs), w = self._shape, self.scheme.weights
        width = math.gcd(min(w.group_size or inputs, inputs), inputs)  # of groups of one size, as a layout makes them
        scales = (1, 1) if w.per_tensor else (outputs, inputs // width)
        codes = take(tensors, "codes", self._shape, torch.float8_e4m3fn)
        self.keep(Float8Weight(codes, take(tensors, "scales", scales, torch.float32)))

    def _codes(self, num_rows: int, num_layers: int) -> RowCodes | None:
        is_float = self.scheme.activations is Activations.none
        return None if is_float else RowCodes(torch.float8_e4m3fn, self.scheme.weights.group_size)


class DequantizedLinear(CodedLinear):
    """A layer that the model keeps in floats (`FloatLinear`), of a checkpoint that does not: its codes become floats when they come."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        return (math.prod(self._shape) + len(self._bias_shape) * self._shape[0]) * dtype.itemsize

    def _hold(self, stored: StoredWeight, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = nn.Parameter(stored.weight.dequantize().to(device, dtype), requires_grad=False)
        self.permutation = None  # the floats are in the channels' own order

    def _restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.weight = nn.Parameter(take(tensors, "weight", self._shape, dtype), requires_grad=False)

    def _multiply(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        return linear(x, self.weight)
