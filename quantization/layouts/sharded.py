"""A shard of a weight that a checkpoint stores whole, in any layout: some of its outputs, or some of its inputs.

O output channels, I input channels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.sharding import Shard, count
from quantization.layouts.base import OutputAxis, StoredWeight, WeightLayout


@dataclass(frozen=True)
class ShardedLayout:
    """A rank's outputs of a weight.

    Only the words or blocks that contain these outputs are read. The other outputs in them are dropped.
    """

    unsharded: WeightLayout
    outputs: tuple[range, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return count(self.outputs), self.unsharded.shape[1]

    def shards(self) -> dict[str, Shard]:
        """Return the shard of each tensor, by name. Tensors without a shard are read whole."""
        axes = self.unsharded.output_axes().items()
        return {
            name: Shard(axis, tuple(_indices(outputs, per) for outputs in self.outputs)) for name, (axis, per) in axes
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        shards = self.shards()
        return {
            name: shards[name].shape(shape) if name in shards else shape
            for name, shape in self.unsharded.tensors().items()
        }

    def output_axes(self) -> dict[str, OutputAxis]:
        raise ValueError("the layout is already sharded")

    def of_outputs(self, num_outputs: int) -> WeightLayout:
        raise ValueError("the layout is already sharded")

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        axes = self.unsharded.output_axes()
        if not axes:
            return _of_rows(self.unsharded.read(tensors), [output for outputs in self.outputs for output in outputs])
        covered = self._covered(axes)
        parts = dict(tensors)
        for name, axis in axes.items():
            parts[name] = _take(tensors[name], axis.axis, list(self._places(covered, axis.per_index)))
        return _of_rows(self.unsharded.of_outputs(count(covered)).read(parts), list(_within(self.outputs, covered)))

    def _covered(self, axes: dict[str, OutputAxis]) -> tuple[range, ...]:
        """Extend each range of outputs so that it neither starts nor ends within a word or a block."""
        size, num_outputs = math.lcm(*(axis.per_index for axis in axes.values())), self.unsharded.shape[0]
        spans = (_indices(outputs, size) for outputs in self.outputs)
        return tuple(range(span.start * size, min(span.stop * size, num_outputs)) for span in spans)

    def _places(self, covered: Sequence[range], per_index: int) -> Iterator[int]:
        """Yield, for each index of a tensor over all covered outputs, its position in the part that was read.

        An index that was not read gets the nearest position; `read` drops its outputs afterwards.
        """
        before = 0
        for outputs_range, covered_range in zip(self.outputs, covered, strict=True):
            read = _indices(outputs_range, per_index)
            yield from (
                before + min(max(i, read.start), read.stop - 1) - read.start for i in _indices(covered_range, per_index)
            )
            before += len(read)


@dataclass(frozen=True)
class InputsLayout:
    """A rank's inputs of a weight whose groups the shards do not split.

    The whole weight is read, because the scale of an output may depend on all of its inputs.
    """

    unsharded: WeightLayout
    inputs: range

    @property
    def shape(self) -> tuple[int, int]:
        return self.unsharded.shape[0], len(self.inputs)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self.unsharded.tensors()

    def output_axes(self) -> dict[str, OutputAxis]:
        raise ValueError("the layout is already sharded")

    def of_outputs(self, num_outputs: int) -> WeightLayout:
        raise ValueError("the layout is already sharded")

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        stored = self.unsharded.read(tensors)
        weight = stored.weight
        assert weight.permutation is None
        zero_points = None if weight.zero_points is None else self._columns(weight.zero_points)
        codes, scales = self._columns(weight.codes), self._columns(weight.scales)
        return replace(stored, weight=replace(weight, codes=codes, scales=scales, zero_points=zero_points))

    def _columns(self, tensor: Tensor) -> Tensor:
        """Return the columns of these inputs of a tensor [O, inputs or groups].

        A single column serves all inputs and stays.
        """
        if tensor.shape[1] == 1:
            return tensor
        inputs_each = self.unsharded.shape[1] // tensor.shape[1]
        return tensor[:, self.inputs.start // inputs_each : self.inputs.stop // inputs_each].contiguous()


def _indices(outputs: range, per_index: int) -> range:
    return range(outputs.start // per_index, -(-outputs.stop // per_index))


def _within(outputs: Sequence[range], covered: Sequence[range]) -> Iterator[int]:
    """Yield the positions of `outputs` in the concatenation of the `covered` ranges."""
    before = 0
    for outputs_range, covered_range in zip(outputs, covered, strict=True):
        yield from range(
            before + outputs_range.start - covered_range.start, before + outputs_range.stop - covered_range.start
        )
        before += len(covered_range)


def _of_rows(stored: StoredWeight, rows: list[int]) -> StoredWeight:
    """Return some rows of a weight. A scale per tensor stays."""
    weight = stored.weight
    scales = _take(weight.scales, 0, rows) if len(weight.scales) == len(weight.codes) else weight.scales
    zero_points = None if weight.zero_points is None else _take(weight.zero_points, 0, rows)
    codes = _take(weight.codes, 0, rows)
    return replace(stored, weight=replace(weight, codes=codes, scales=scales, zero_points=zero_points))


def _take(tensor: Tensor, axis: int, places: list[int]) -> Tensor:
    if places == list(range(tensor.shape[axis])):
        return tensor
    return tensor.index_select(axis, torch.tensor(places))
