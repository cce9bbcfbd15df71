"""Weights in floats: in the checkpoint's order, or in the order of the CPU kernels.

R rows, I input channels, O output channels.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kernels.linear import FloatWeight, GPUWeight, linear, matmul, pack
from kernels.linear.gpu_weight import of_floats
from kernels.quantize_rows import Activations
from models.layers.linear_method import LinearMethod, Weight, take
from models.sharding import Shard, count


class StoredMatrix(Protocol):
    """A matrix that a checkpoint stores in any format, and that is read as floats."""

    @property
    def shape(self) -> tuple[int, int]:
        """[O, I]"""

    @property
    def is_float(self) -> bool:
        """Whether the checkpoint stores floats of 16 or 32 bits."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors that store the matrix."""

    def read(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the matrix [O, I]. Raises UserError for invalid values."""

    def shard(self, outputs: tuple[range, ...]) -> "tuple[StoredMatrix, dict[str, Shard]]":
        """Return the matrix of a rank's rows, and the shards of its tensors, as `LinearMethod.shard` does."""

    def shard_inputs(self, inputs: range) -> "tuple[StoredMatrix, dict[str, Shard]]":
        """Return the same for a rank's columns."""


@dataclass(frozen=True)
class StoredFloats:
    """The tensor `weight` [O, I], or [I, O] if it is transposed."""

    shape: tuple[int, int]
    is_transposed: bool = False
    is_float = True

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self.shape[::-1] if self.is_transposed else self.shape}

    def read(self, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["weight"].T if self.is_transposed else tensors["weight"]

    def shard(self, outputs: tuple[range, ...]) -> tuple["StoredFloats", dict[str, Shard]]:
        shape = count(outputs), self.shape[1]
        return StoredFloats(shape, self.is_transposed), {"weight": Shard(int(self.is_transposed), outputs)}

    def shard_inputs(self, inputs: range) -> tuple["StoredFloats", dict[str, Shard]]:
        shape = self.shape[0], len(inputs)
        return StoredFloats(shape, self.is_transposed), {"weight": Shard(int(not self.is_transposed), (inputs,))}


class DenseMethod(LinearMethod):
    """The parameter `weight` in the checkpoint's order."""

    def __init__(
        self, stored: StoredMatrix, is_transposed: bool = False, parameter: nn.Parameter | None = None
    ) -> None:
        """`parameter` [O, I], or [I, O] if it is transposed."""
        self.stored = stored
        self.takes_floats = stored.is_float
        self.is_transposed = is_transposed
        self._parameter = parameter

    @property
    def weight(self) -> Tensor:
        assert self._parameter is not None
        return self._parameter.T if self.is_transposed else self._parameter

    @property
    def held(self) -> dict[str, Tensor]:
        return {} if self._parameter is None else {"weight": self._parameter}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self.stored.tensors()

    def num_bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.stored.shape) * dtype.itemsize

    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        matrix = self.stored.read(tensors)
        self._hold((matrix.T if self.is_transposed else matrix).to(device, dtype, copy=True))

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        shape = self.stored.shape[::-1] if self.is_transposed else self.stored.shape
        self._hold(take(tensors, "weight", shape, dtype))

    def _hold(self, weight: Tensor) -> None:
        self._parameter = nn.Parameter(weight, requires_grad=False)

    def with_weight(self, weight: Weight) -> "DenseMethod":
        matrix = weight.codes if isinstance(weight, GPUWeight) else weight
        assert isinstance(matrix, Tensor)
        outputs, inputs = matrix.shape
        parameter = nn.Parameter(matrix.T if self.is_transposed else matrix, requires_grad=False)
        return DenseMethod(StoredFloats((outputs, inputs), self.is_transposed), self.is_transposed, parameter)

    def shard(self, outputs: tuple[range, ...]) -> "tuple[DenseMethod, dict[str, Shard]]":
        stored, shards = self.stored.shard(outputs)
        parameter = self._parameter
        if parameter is not None:
            shape = Shard(int(self.is_transposed), outputs).shape(tuple(parameter.shape))
            parameter = nn.Parameter(parameter.new_empty(shape))
        return DenseMethod(stored, self.is_transposed, parameter), shards

    def shard_inputs(self, ranges: Sequence[range], rank: int) -> "tuple[DenseMethod, dict[str, Shard]]":
        stored, shards = self.stored.shard_inputs(ranges[rank])
        parameter = self._parameter
        if parameter is not None:
            shape = stored.shape[::-1] if self.is_transposed else stored.shape
            parameter = nn.Parameter(parameter.new_empty(shape))
        return DenseMethod(stored, self.is_transposed, parameter), shards

    def apply(self, x: Activations, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        return linear(x, self.weight, bias)

    @property
    def gpu_weight(self) -> GPUWeight | None:
        is_readable = self._parameter is not None and self._parameter.is_cuda and not self.is_transposed
        return of_floats(self.weight.detach()) if is_readable else None

    @property
    def merge_key(self) -> Hashable:
        weight = self.gpu_weight
        return None if weight is None else (DenseMethod, weight.output_format)


class PackedDenseMethod(LinearMethod):
    """The parameter `tiles`: the weight packed for the CPU kernels.

    bfloat16 is compressed to 12 bits if this is a gain.
    """

    def __init__(self, stored: StoredMatrix) -> None:
        self.stored = stored
        self.takes_floats = stored.is_float
        self._weight: FloatWeight | None = None

    @property
    def weight(self) -> FloatWeight:
        assert self._weight is not None
        return self._weight

    @property
    def held(self) -> dict[str, Tensor]:
        # the memory that the kernels read, so that it is counted
        return {} if self._weight is None else {"tiles": nn.Parameter(self._weight.memory, requires_grad=False)}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self.stored.tensors()

    def num_bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.stored.shape) * dtype.itemsize

    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._weight = pack(self.stored.read(tensors).to(dtype))

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        weight = FloatWeight(tensors.pop("tiles"), *self.stored.shape)
        if weight.dtype != dtype:
            raise ValueError(f"packed weights of {weight.dtype}, not {dtype}")
        weight.check()
        self._weight = weight

    def with_weight(self, weight: Weight) -> "PackedDenseMethod":
        assert isinstance(weight, FloatWeight)
        method = PackedDenseMethod(StoredFloats((weight.num_outputs, weight.num_inputs)))
        method._weight = weight
        return method

    def shard(self, outputs: tuple[range, ...]) -> "tuple[PackedDenseMethod, dict[str, Shard]]":
        stored, shards = self.stored.shard(outputs)
        return PackedDenseMethod(stored), shards

    def shard_inputs(self, ranges: Sequence[range], rank: int) -> "tuple[PackedDenseMethod, dict[str, Shard]]":
        stored, shards = self.stored.shard_inputs(ranges[rank])
        return PackedDenseMethod(stored), shards

    def apply(self, x: Activations, bias: Tensor | None) -> Tensor:
        return matmul(x, self.weight, bias)

    @property
    def merge_key(self) -> Hashable:
        return None if self._weight is None else (PackedDenseMethod, self._weight.num_inputs, self._weight.dtype)
