"""The arithmetic of parallel layouts: which layers, heads and channels each rank has. It uses no tensors.

Linear layers are sharded along their outputs, so that each output is one sum in any layout and has the bits of one
process. They are sharded along their inputs only if the layout `adds`. A pipeline stage has consecutive layers; its
ranks share each layer.

p ranks of a stage, H query heads, G key/value heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import MappingProxyType

from conf.errors import UserError
from models.layout import Unit

STEP = 16  # the number of adjacent outputs in one kernel register


@dataclass(frozen=True)
class ParallelLayout:
    """The position of one rank: rank `tp_rank` of `tp` tensor-parallel ranks, in pipeline stage `stage` of `pp`."""

    tp: int = 1
    pp: int = 1
    tp_rank: int = 0
    stage: int = 0
    adds: bool = False
    """Whether ranks add partial products of layers with sharded inputs, instead of gathering inputs and outputs."""
    whole_experts: bool = False
    """Whether each expert of a mixture is whole on one rank. If false, all ranks have a shard of each expert."""

    @property
    def rank(self) -> int:
        """The global rank. The ranks of one stage are consecutive."""
        return self.stage * self.tp + self.tp_rank


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor: ranges of indices along one axis, in this order."""

    axis: int
    ranges: tuple[range, ...]

    def shape(self, tensor_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor of shape `tensor_shape`."""
        return tuple(count(self.ranges) if axis == self.axis else size for axis, size in enumerate(tensor_shape))


@dataclass(frozen=True)
class HeadShard:
    """A rank's heads of an attention layer. `keys` are the key/value heads that its `queries` read."""

    queries: range
    keys: range


def count(ranges: Sequence[range]) -> int:
    """Return the total length of the ranges."""
    return sum(map(len, ranges))


def shard(total: int, parts: int, index: int) -> range:
    """Return part `index` of `parts` almost equal parts. Their sizes differ by at most 1."""
    return range(index * total // parts, (index + 1) * total // parts)


@cache
def shard_channels(total: int, tp: int, rank: int) -> range:
    """Return a rank's range of channels or vocabulary entries.

    Its borders are multiples of STEP, except the end of the last range, if there are at least as many steps as ranks.
    Raises UserError for fewer channels than ranks.
    """
    if tp > total:
        raise UserError(f"tp={tp} is more than the {total} channels of a layer of this model: give at most {total}")
    step = STEP if -(-total // STEP) >= tp else 1
    steps = shard(-(-total // step), tp, rank)
    return range(steps.start * step, min(steps.stop * step, total))


@cache
def shard_heads(num_queries: int, num_keys: int, tp: int, rank: int) -> HeadShard:
    """Return a rank's heads, of H queries and G keys.

    A rank gets key heads with all their query heads. With more ranks than key heads, it gets some query heads of one
    key head. Raises UserError for more ranks than query heads.
    """
    if tp > num_queries:
        raise UserError(f"tp={tp} is more than the {num_queries} query heads of this model: give at most {num_queries}")
    group = num_queries // num_keys
    if tp <= num_keys:
        keys = shard(num_keys, tp, rank)
        return HeadShard(range(keys.start * group, keys.stop * group), keys)
    key = rank * num_keys // tp
    sharing = [other_rank for other_rank in range(tp) if other_rank * num_keys // tp == key]
    part = shard(group, len(sharing), rank - sharing[0])
    return HeadShard(range(key * group + part.start, key * group + part.stop), range(key, key + 1))


@cache
def shard_outputs(
    units: tuple[Unit, ...], size: int, num_heads: tuple[int, int] | None, tp: int, rank: int
) -> tuple[range, ...]:
    """Return the output ranges that a rank owns in a fused projection with `size` outputs.

    `units` are the units of its consecutive sections. `num_heads`: H and G of the layer's attention; None if all units
    are channels.
    """
    if num_heads is None or set(units) == {Unit.CHANNEL}:
        length = size // len(units)
        channels = shard_channels(length, tp, rank)
        return tuple(range(i * length + channels.start, i * length + channels.stop) for i in range(len(units)))
    heads = shard_heads(*num_heads, tp, rank)
    unit_heads = {
        Unit.QUERY_HEAD: (num_heads[0], heads.queries),
        Unit.KEY_VALUE_HEAD: (num_heads[1], heads.keys),
        Unit.QKV_HEAD: (num_heads[0], heads.queries),
    }
    counts = [unit_heads[unit][0] for unit in units]
    width = size // sum(counts)  # the width of a head, equal in all sections
    starts = accumulate([0, *counts[:-1]])
    head_ranges = [unit_heads[unit][1] for unit in units]
    return tuple(
        range((start + heads.start) * width, (start + heads.stop) * width)
        for start, heads in zip(starts, head_ranges, strict=True)
    )


def shard_inputs(inputs: int, num_heads: tuple[int, int] | None, tp: int) -> list[range]:
    """Return the input range of each rank for a row-parallel layer.

    num_heads: H and G if the inputs are attention heads; None if they are feed-forward channels.
    """
    if num_heads is None:
        return [shard_channels(inputs, tp, rank) for rank in range(tp)]
    width = inputs // num_heads[0]
    queries = [shard_heads(*num_heads, tp, rank).queries for rank in range(tp)]
    return [range(rank_queries.start * width, rank_queries.stop * width) for rank_queries in queries]


def stages(
    layer_bytes: Sequence[int],
    first_bytes: int,
    last_bytes: int,
    pp: int,
    shared_caches: Mapping[int, int] = MappingProxyType({}),
) -> list[range]:
    """Return the layers of each of `pp` pipeline stages, at least one each. The bytes of the largest stage are minimal.

    The first stage also has `first_bytes`, the last stage also has `last_bytes`. A layer is in the stage of the layer
    whose cache it reads (`ModelShape.shared_caches`). Raises UserError for more stages than layers.
    """
    num_layers, sharing = len(layer_bytes), [range(first, last) for last, first in shared_caches.items()]
    # the layers before each possible border
    borders = [end for end in range(num_layers + 1) if not any(end - 1 in layers for layers in sharing)]
    num_parts = len(borders) - 1
    if pp > num_parts:
        parts = f"{num_parts} parts, whose layers share keys and values" if sharing else f"{num_layers} layers"
        raise UserError(f"pp={pp} is more than the model's {parts}: give at most {num_parts}")
    bytes_before = [*accumulate(layer_bytes, initial=first_bytes)]
    sums = [bytes_before[border] for border in borders]
    sums[0], sums[-1] = 0, sums[-1] + last_bytes
    # by the number of parts that the first `stage` stages have: the bytes of the largest stage, and their ends
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for stage in range(1, pp + 1):
        ends = range(stage, num_parts - pp + stage + 1)
        best = {
            end: min(
                (max(largest, sums[end] - sums[start]), (*parts_before, end))
                for start, (largest, parts_before) in best.items()
                if start < end
            )
            for end in ends
        }
    _, stage_ends = best[num_parts]
    return [range(borders[start], borders[end]) for start, end in zip(stage_ends, stage_ends[1:], strict=False)]
