"""Linear layers with quantised weights, and optionally quantised activations: a method for each number format.

R rows, I input channels, O output channels, G groups of input channels.
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from conf.errors import UserError
from conf.quantization import GROUP_SIZES, Activations
from kernels.linear import (
    BlockWeight,
    Float8Weight,
    GPUWeight,
    IntWeight,
    matmul,
    pack_blocks,
    pack_codes,
    pack_float8,
)
from kernels.linear.block_weight import UNIT
from kernels.linear.gpu_weight import pack_fp4
from kernels.quantize_rows import ActivationFormat, QuantizedActivations, quantize_rows
from kernels.take_channels import take_channels
from models.layers.linear_method import LinearMethod, Weight, take
from models.sharding import Shard
from quantization.codes import CodeKind
from quantization.layouts.base import StoredWeight, WeightLayout, may_be_permuted
from quantization.layouts.floats import FloatLayout
from quantization.layouts.sharded import InputsLayout, ShardedLayout
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight

# Minimum number of rows that activations=auto quantises. Int8 activations are one int8 product, float activations are
# two. One is faster from 5 rows with int8 weights and from 3 rows with int4 (one thread; with more threads memory
# bandwidth matters more). With 8 rows it is 1.4 to 1.9 times as fast.
MANY_ROWS = 8

CodedWeight: TypeAlias = IntWeight | Float8Weight | BlockWeight | GPUWeight


class CodedMethod(LinearMethod):
    """A quantised weight of any number format, and how activations are quantised before the product."""

    def __init__(self, scheme: LinearScheme, layout: WeightLayout, shape: tuple[int, int]) -> None:
        """layout: how the checkpoint stores the weight. shape: [O, I]."""
        self.scheme = scheme
        self.takes_floats = isinstance(layout, FloatLayout)
        self._layout = layout
        self._shape = shape
        self._weight: CodedWeight | None = None

    @abstractmethod
    def pack(self, weight: QuantizedWeight) -> CodedWeight:
        """Return the weight in the form that the kernels of its device read."""

    @abstractmethod
    def take_weight(self, tensors: dict[str, Tensor]) -> CodedWeight:
        """Take a CPU weight out of `tensors`. Raises KeyError and ValueError as `restore` does."""

    @abstractmethod
    def code_format(self, num_rows: int, num_weights: int) -> ActivationFormat | None:
        """Return the activation format, without static scales, for rows that are shared among weights; None for floats."""

    @property
    def weight(self) -> CodedWeight:
        assert self._weight is not None
        return self._weight

    @property
    def held(self) -> dict[str, Tensor]:
        if self._weight is None:
            return {}
        # The memory that the kernels read is registered, so that it is counted.
        parameters = {name: nn.Parameter(part, requires_grad=False) for name, part in self._weight.tensors.items()}
        buffers = {"permutation": self.permutation, "input_scale": self.input_scale}
        return {**parameters, **{name: buffer for name, buffer in buffers.items() if buffer is not None}}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self._layout.tensors()

    def num_bytes(self, dtype: torch.dtype) -> int:
        return self.scheme.weights.num_bytes(*self._shape)

    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.hold(self._layout.read(tensors), device)

    def hold(self, stored: StoredWeight, device: torch.device) -> None:
        """Set a weight that is already quantised."""
        weight, scale = stored.weight, stored.input_scale
        zero_points = None if weight.zero_points is None else weight.zero_points.to(device)
        self.permutation = None if weight.permutation is None else weight.permutation.to(device)
        self.input_scale = None if scale is None else scale.to(device, torch.float32)
        self._weight = self.pack(QuantizedWeight(weight.codes.to(device), weight.scales.to(device), zero_points))

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        if self.scheme.activations is Activations.static:
            self.input_scale = take(tensors, "input_scale", (), torch.float32)
        if not self.takes_floats and "permutation" in tensors:
            num_inputs = self._shape[1]
            self.permutation = take(tensors, "permutation", (num_inputs,), torch.int64)
            if not self.permutation.sort().values.equal(torch.arange(num_inputs)):
                raise ValueError(f"its permutation does not name each of {num_inputs} inputs once")
        self._weight = self.take_weight(tensors)

    def with_weight(self, weight: Weight) -> "CodedMethod":
        assert isinstance(weight, CodedWeight)
        method = copy.copy(self)
        method._weight = weight
        method._shape = weight.num_outputs, self._shape[1]
        return method

    def shard(self, outputs: tuple[range, ...]) -> "tuple[CodedMethod, dict[str, Shard]]":
        method, layout = copy.copy(self), ShardedLayout(self._layout, outputs)
        method._layout, method._shape = layout, layout.shape
        return method, layout.shards()

    def shard_inputs(self, ranges: Sequence[range], rank: int) -> "tuple[CodedMethod, dict[str, Shard]] | None":
        """Return None also for permuted inputs, and if a shard would split a group, a block or a per-token scale."""
        weights, size = self.scheme.weights, self.scheme.weights.group_size or 1
        has_row_scales = self.scheme.activations not in (Activations.none, Activations.static)
        if has_row_scales or weights.kind.is_blocks or may_be_permuted(self._layout):
            return None
        if any(inputs.stop % size for inputs in ranges):
            return None
        method = copy.copy(self)
        method._layout = layout = InputsLayout(self._layout, ranges[rank])
        method._shape = layout.shape
        return method, {}

    def apply(self, x: Tensor | QuantizedActivations, bias: Tensor | None) -> Tensor:
        return matmul(self.quantized(x), self.weight, bias)

    def activations(self, num_rows: int, num_weights: int = 1) -> ActivationFormat | None:
        """Return None also if the weight permutes its input channels, because `quantized` must permute them first."""
        format = self.code_format(num_rows, num_weights)
        return (
            None if format is None or self.permutation is not None else format._replace(static_scales=self.input_scale)
        )

    def quantized(self, x: Tensor | QuantizedActivations, num_weights: int = 1) -> Tensor | QuantizedActivations:
        if isinstance(x, QuantizedActivations):
            return x
        if self.permutation is not None:
            x = take_channels(x, self.permutation)
        format = self.code_format(x.shape[0], num_weights)
        if format is None:
            return x
        codes, scales = quantize_rows(x, format.dtype, format.group_size, self.input_scale)
        return QuantizedActivations(codes, scales, x.dtype, format.group_size)

    @property
    def merge_key(self) -> Hashable:
        weight = self._weight
        if weight is None:
            return None
        format = weight.output_format if isinstance(weight, GPUWeight) else weight.format
        order = None if self.permutation is None else tuple(self.permutation.tolist())
        return self.scheme, weight.num_inputs, format, order

    @property
    def gpu_weight(self) -> GPUWeight | None:
        return self._weight if isinstance(self._weight, GPUWeight) else None


class IntMethod(CodedMethod):
    """4- or 8-bit integer weights. Activations are floats, or 8-bit integers with a scale per token."""

    def pack(self, weight: QuantizedWeight) -> CodedWeight:
        """Each scale is repeated if the kernels have only smaller groups. Raises UserError for too small groups."""
        repeats = (self.scheme.weights.group_size or self._shape[1]) // self._group_size
        parts = weight.scales, weight.zero_points
        scales, zero_points = (part if part is None else part.repeat_interleave(repeats, 1) for part in parts)
        assert scales is not None
        return pack_codes(weight.codes, scales, zero_points, self.scheme.weights.bits)

    def take_weight(self, tensors: dict[str, Tensor]) -> CodedWeight:
        w = self.scheme.weights
        return IntWeight(tensors.pop("packed"), *self._shape, self._group_size, w.bits, has_zero_points=not w.symmetric)

    def num_bytes(self, dtype: torch.dtype) -> int:
        return replace(self.scheme.weights, group_size=self._group_size).num_bytes(*self._shape)

    @property
    def _group_size(self) -> int:
        """The largest groups of the kernels that divide the file's groups."""
        num_inputs = self._shape[1]
        size = self.scheme.weights.group_size or num_inputs
        if size == num_inputs:
            return size
        sizes = [kernel_size for kernel_size in GROUP_SIZES if kernel_size > 0 and size % kernel_size == 0]
        if not sizes:
            raise UserError(f"groups of {size} input channels are not supported: only multiples of 32, and whole rows")
        return max(sizes)

    def code_format(self, num_rows: int, num_weights: int) -> ActivationFormat | None:
        activations = self.scheme.activations
        if activations is Activations.none or activations is Activations.auto and num_rows < MANY_ROWS * num_weights:
            return None
        return ActivationFormat(torch.int8)


class Float8Method(CodedMethod):
    """float8 weights.

    Activations are floats or float8, with a scale per token, or per group of a token if weights have groups.
    """

    def pack(self, weight: QuantizedWeight) -> CodedWeight:
        return pack_float8(weight.codes, weight.scales)

    def take_weight(self, tensors: dict[str, Tensor]) -> CodedWeight:
        (outputs, inputs), w = self._shape, self.scheme.weights
        # The group size as the layouts produce it: it divides the inputs.
        width = math.gcd(min(w.group_size or inputs, inputs), inputs)
        return Float8Weight(tensors.pop("packed"), outputs, inputs, width)

    def code_format(self, num_rows: int, num_weights: int) -> ActivationFormat | None:
        is_float = self.scheme.activations is Activations.none
        return None if is_float else ActivationFormat(torch.float8_e4m3fn, self.scheme.weights.group_size)


class BlockMethod(CodedMethod):
    """ggml's blocks, on a CPU, and FP4 on a GPU. Activations are floats, or, on a CPU, 8-bit integers with a scale per
    32 inputs."""

    def pack(self, weight: QuantizedWeight) -> CodedWeight:
        kind, is_on_gpu = self.scheme.weights.kind, not weight.codes.is_cpu
        if is_on_gpu and kind not in (CodeKind.MXFP4, CodeKind.NVFP4):
            name = kind.name.lower()
            raise UserError(f"{name} is for a CPU: give int8 or int4 in quant.overrides, quant.embedding or quant.plan")
        pack = pack_fp4 if is_on_gpu else pack_blocks
        return pack(kind.name, weight.codes, weight.global_scale)

    def take_weight(self, tensors: dict[str, Tensor]) -> CodedWeight:
        return BlockWeight(tensors.pop("packed"), *self._shape, self.scheme.weights.kind.name)

    def code_format(self, num_rows: int, num_weights: int) -> ActivationFormat | None:
        is_float = self.scheme.activations is Activations.none or isinstance(self._weight, GPUWeight)
        return None if is_float else ActivationFormat(torch.int8, UNIT)


def quantized_if_many(x: Tensor, num_weights: int) -> Tensor | QuantizedActivations:
    """Return x [R, I] as `activations=auto` passes it to `num_weights` integer weights.

    x is quantised if it has many rows.
    """
    return QuantizedActivations(*quantize_rows(x), x.dtype) if len(x) >= MANY_ROWS * num_weights else x


METHODS: dict[CodeKind, type[CodedMethod]] = {
    CodeKind.INT: IntMethod,
    CodeKind.FP8: Float8Method,
    **{kind: BlockMethod for kind in CodeKind if kind.is_blocks},
}


def method_of(scheme: LinearScheme, layout: WeightLayout, shape: tuple[int, int]) -> CodedMethod:
    """Return the method of a scheme for a weight [O, I] that a checkpoint stores in `layout`."""
    return METHODS[scheme.weights.kind](scheme, layout, shape)


@dataclass(frozen=True)
class Dequantized:
    """A weight that is codes in the checkpoint and floats in the model: a `StoredMatrix`."""

    layout: WeightLayout
    shape: tuple[int, int]
    is_float = False

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self.layout.tensors()

    def read(self, tensors: dict[str, Tensor]) -> Tensor:
        return self.layout.read(tensors).weight.dequantize()

    def shard(self, outputs: tuple[range, ...]) -> "tuple[Dequantized, dict[str, Shard]]":
        layout = ShardedLayout(self.layout, outputs)
        return Dequantized(layout, layout.shape), layout.shards()

    def shard_inputs(self, inputs: range) -> "tuple[DequantizedInputs, dict[str, Shard]]":
        return DequantizedInputs(self, inputs), {}


@dataclass(frozen=True)
class DequantizedInputs:
    """Some input channels of a `Dequantized` weight, which is read whole."""

    unsharded: Dequantized
    inputs: range
    is_float = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.unsharded.shape[0], len(self.inputs)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self.unsharded.tensors()

    def read(self, tensors: dict[str, Tensor]) -> Tensor:
        return self.unsharded.read(tensors)[:, self.inputs.start : self.inputs.stop]

    def shard(self, outputs: tuple[range, ...]) -> "tuple[DequantizedInputs, dict[str, Shard]]":
        raise ValueError("the matrix is already sharded")

    def shard_inputs(self, inputs: range) -> "tuple[DequantizedInputs, dict[str, Shard]]":
        raise ValueError("the matrix is already sharded")
