"""The interface between a linear layer and what its weight is held in.

R rows, I input channels, O output channels.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from kernels.linear import GPUWeight, PackedWeight
from kernels.quantize_rows import ActivationFormat, QuantizedActivations, Rows
from models.sharding import Shard

Weight: TypeAlias = Tensor | PackedWeight | GPUWeight


class LinearMethod(ABC):
    """The holder of a linear layer's weight [O, I], which also multiplies by it."""

    takes_floats: bool
    """Whether the tensors of `tensors` are floats of 16 or 32 bits."""
    input_scale: Tensor | None = None
    """float32 []: the scale of all activations, where calibration has chosen one."""
    permutation: Tensor | None = None
    """int64 [I]: the order of input channels in the weight, where it is another."""

    @property
    @abstractmethod
    def weight(self) -> Weight:
        """Return the weight as the kernels read it. It is there after `load`."""

    @property
    @abstractmethod
    def held(self) -> dict[str, Tensor]:
        """Return the tensors that a layer registers, by name: parameters, and buffers, which do not count as weights."""

    @abstractmethod
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names, within the layer, and the shapes of the checkpoint's tensors that `load` takes."""

    @abstractmethod
    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the parameters after `load` in a model of `dtype`, without padding and compression."""

    @abstractmethod
    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Make the weight of tensors on the CPU, in a model of `dtype`. Raises UserError for impossible values."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Take out of `tensors` what was `held` after `load` in a model of `dtype`.

        Raises KeyError for a tensor that is missing, and ValueError for one of another shape or dtype, or with numbers by which a kernel
        would read beyond it.
        """

    @abstractmethod
    def with_weight(self, weight: Weight) -> "LinearMethod":
        """Return a method that differs from this one in its weight, and so in its outputs, alone."""

    @abstractmethod
    def apply(self, x: Rows, bias: Tensor | None) -> Tensor:
        """Return x [R, I] times the weight transposed, plus bias [O]: [R, O]."""

    @abstractmethod
    def shard(self, outputs: tuple[range, ...]) -> "tuple[LinearMethod, dict[str, Shard]]":
        """Return the method of some outputs, and how the checkpoint's tensors are cut that it loads, by name; others it loads whole.

        Only before `load`, and for a method that was not shared yet.
        """

    def shard_inputs(self, ranges: Sequence[range], rank: int) -> "tuple[LinearMethod, dict[str, Shard]] | None":
        """Return what `shard` does for a rank's inputs, of `ranges` by rank. None: products of such parts do not add up to the whole."""
        return None

    def slice_outputs(self, outputs: slice) -> "LinearMethod":
        """Return the method of a range of outputs of a loaded one."""
        return self.with_weight(_cut(self.weight, outputs))

    def activations(self, num_rows: int, num_weights: int = 1) -> ActivationFormat | None:
        """Return the activation format that the weight is multiplied by, or None for floats.

        `num_weights`: how many weights divide `num_rows` rows among them.
        """
        return None

    def quantized(self, x: Rows, num_weights: int = 1) -> Rows:
        """Return x [R, I] in the format of `activations`, its channels in the order of the weight."""
        return x

    @property
    def merge_key(self) -> Hashable:
        """Return what methods have in common whose weights are multiplied in one call. None: this one is multiplied alone."""
        return None

    @property
    def gpu_weight(self) -> GPUWeight | None:
        """Return the weight in the form in which those of several layers may lie in one, or None on a CPU."""
        return None


def _cut(weight: Weight, outputs: slice) -> Weight:
    """Return the weight of a range of outputs: a view, or of a packed weight a copy."""
    return weight[outputs] if isinstance(weight, Tensor) else weight.slice_outputs(outputs)


def are_alike(methods: Sequence[LinearMethod]) -> bool:
    """Return whether the weights of all these methods can be multiplied in one call."""
    keys = {method.merge_key for method in methods}
    return len(keys) == 1 and None not in keys


def share_input_scale(methods: Sequence[LinearMethod]) -> bool:
    """Return whether all these methods, which are alike, quantise their activations with one scale, or each row with its own."""
    scales = [method.input_scale for method in methods]
    chosen = [scale for scale in scales if scale is not None]
    return not chosen or len(chosen) == len(scales) and all(scale.equal(chosen[0]) for scale in chosen)


def quantized_activations(codes: Tensor, scales: Tensor, dtype: torch.dtype, group_size: int | None) -> Tensor:
    """Return quantised activations as what an architecture passes on: only the linear layers after a norm or a gate look inside."""
    return cast(Tensor, QuantizedActivations(codes, scales, dtype, group_size))


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Take the tensor of this name out of `tensors`. Raises KeyError where it is missing, ValueError for another shape or dtype."""
    tensor = tensors.pop(name)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{list(tensor.shape)} of {tensor.dtype}, not {list(shape)} of {dtype}, for its {name}")
    return tensor
