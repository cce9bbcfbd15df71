"""The interface between a linear layer and the format of its weight.

R rows, I input channels, O output channels.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.linear import GPUWeight, PackedWeight, lookup
from kernels.quantize_rows import ActivationFormat, Activations
from kernels.take_channels import take_channels
from models.sharding import Shard

Weight: TypeAlias = Tensor | PackedWeight | GPUWeight


class LinearMethod(ABC):
    """Holds a linear layer's weight [O, I] and multiplies by it."""

    takes_floats: bool
    """Whether `load` takes floats of 16 or 32 bits."""
    input_scale: Tensor | None = None
    """float32 []: the static scale of all activations. None: calibration set no scale."""
    permutation: Tensor | None = None
    """int64 [I]: the order of the input channels in the weight. None: the natural order."""

    @property
    @abstractmethod
    def weight(self) -> Weight:
        """The weight in the kernels' format. Available after `load`."""

    @property
    @abstractmethod
    def held(self) -> dict[str, Tensor]:
        """The tensors that the layer registers, by name: parameters, and buffers, which do not count as weights."""

    @abstractmethod
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names, within the layer, and the shapes of the checkpoint tensors that `load` takes."""

    @abstractmethod
    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the parameters after `load` in a model of `dtype`, without padding and compression."""

    @abstractmethod
    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Create the weight from tensors on the CPU, in a model of `dtype`. Raises UserError for invalid values."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Take the tensors that were `held` after `load`, in a model of `dtype`, out of `tensors`.

        Raises KeyError for a missing tensor. Raises ValueError for a wrong shape or dtype, and for values that would
        make a kernel read out of bounds.
        """

    @abstractmethod
    def with_weight(self, weight: Weight) -> "LinearMethod":
        """Return a method that differs from this one only in its weight, and therefore its outputs."""

    @abstractmethod
    def apply(self, x: Activations, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias: [R, O], for x [R, I] and bias [O]."""

    def rows(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows `numbers` int64 [R] of the weight: [R, I] in `dtype`, the dtype of the model."""
        rows = lookup(self.weight, numbers, dtype)
        return rows if self.permutation is None else take_channels(rows, self.permutation.argsort())

    @abstractmethod
    def shard(self, outputs: tuple[range, ...]) -> "tuple[LinearMethod, dict[str, Shard]]":
        """Return the method for a rank's outputs, and the shards of the checkpoint tensors that it loads, by name.

        Tensors without an entry are loaded whole. Call it once, and before `load`.
        """

    def shard_inputs(self, ranges: Sequence[range], rank: int) -> "tuple[LinearMethod, dict[str, Shard]] | None":
        """Return the same as `shard` for the inputs `ranges[rank]`.

        None: partial products do not add up to the whole product.
        """
        return None

    def slice_outputs(self, outputs: slice) -> "LinearMethod":
        """Return the method for a range of outputs of this loaded method."""
        return self.with_weight(_cut(self.weight, outputs))

    def activations(self, num_rows: int, num_weights: int = 1) -> ActivationFormat | None:
        """Return the format in which activations are multiplied. None: floats.

        `num_weights`: the number of weights among which `num_rows` rows are distributed.
        """
        return None

    def quantized(self, x: Activations, num_weights: int = 1) -> Activations:
        """Return x [R, I] in the format of `activations`, with channels in the weight's order."""
        return x

    @property
    def merge_key(self) -> Hashable:
        """Methods with equal keys can be multiplied in one call. None: the method is always multiplied alone."""
        return None

    @property
    def gpu_weight(self) -> GPUWeight | None:
        """The weight in a form that can be joined with the weights of other layers. None: the weight is on a CPU."""
        return None


def _cut(weight: Weight, outputs: slice) -> Weight:
    return weight[outputs] if isinstance(weight, Tensor) else weight.slice_outputs(outputs)


def are_alike(methods: Sequence[LinearMethod]) -> bool:
    """Return whether the weights of all these methods can be multiplied in one call."""
    keys = {method.merge_key for method in methods}
    return len(keys) == 1 and None not in keys


def share_input_scale(methods: Sequence[LinearMethod]) -> bool:
    """Return whether methods of one `merge_key` all use one static activation scale, or all a scale per row."""
    scales = [method.input_scale for method in methods]
    chosen = [scale for scale in scales if scale is not None]
    return not chosen or len(chosen) == len(scales) and all(scale.equal(chosen[0]) for scale in chosen)


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Take the tensor `name` out of `tensors`.

    Raises KeyError if it is missing, ValueError for a wrong shape or dtype.
    """
    tensor = tensors.pop(name)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{list(tensor.shape)} of {tensor.dtype}, not {list(shape)} of {dtype}, for its {name}")
    return tensor
