"""How a model is divided among ranks: arithmetic without tensors.

Every linear layer is cut along its outputs, so that each output is one sum in any division and has the bits of one process; along its
inputs only where a division `adds`. A stage has consecutive layers, its ranks have parts of each.

p ranks of a stage, H query heads, G key/value heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from conf.errors import UserError
from models.layout import Unit

STEP = 16  # outputs that a kernel's register holds beside each other


@dataclass(frozen=True)
class ParallelLayout:
    """The place of one rank: of `tp` that share each layer, in one of `pp` stages of layers."""

    tp: int = 1
    pp: int = 1
    tp_rank: int = 0
    stage: int = 0
    adds: bool = False
    """Whether ranks add their parts of a product where its inputs can be cut, instead of joining pieces of inputs and outputs."""
    whole_experts: bool = False
    """Whether each expert of a mixture is on one rank, instead of a part on each."""

    @property
    def rank(self) -> int:
        """The rank's number. Those of a stage have numbers that follow each other."""
        return self.stage * self.tp + self.tp_rank


@dataclass(frozen=True)
class Shard:
    """Names the part of a tensor that a rank has: ranges of indices along one axis, in this order."""

    axis: int
    ranges: tuple[range, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of this shape."""
        return tuple(count(self.ranges) if axis == self.axis else size for axis, size in enumerate(whole))


@dataclass(frozen=True)
class HeadShard:
    """A rank's heads of an attention layer. Its key/value heads are those that its queries read."""

    queries: range
    keys: range


def count(ranges: Sequence[range]) -> int:
    """Return how many indices the ranges have."""
    return sum(map(len, ranges))


def shard(total: int, parts: int, index: int) -> range:
    """Return part `index` of `parts`, whose sizes differ by at most 1."""
    return range(index * total // parts, (index + 1) * total // parts)


@cache
def shard_channels(total: int, tp: int, rank: int) -> range:
    """Return a rank's channels, or words of a vocabulary: whole steps of STEP, but for the last, if there are as many steps as ranks.

    Raises UserError for fewer channels than ranks.
    """
    if tp > total:
        raise UserError(f"tp={tp} is more than the {total} channels of a layer of this model: give at most {total}")
    step = STEP if -(-total // STEP) >= tp else 1
    steps = shard(-(-total // step), tp, rank)
    return range(steps.start * step, min(steps.stop * step, total))


@cache
def shard_heads(num_queries: int, num_keys: int, tp: int, rank: int) -> HeadShard:
    """Return a rank's heads of H queries and G keys: keys with all their queries, or for more ranks than keys some queries of one key.

    Raises UserError for more ranks than query heads.
    """
    if tp > num_queries:
        raise UserError(f"tp={tp} is more than the {num_queries} query heads of this model: give at most {num_queries}")
    group = num_queries // num_keys
    if tp <= num_keys:
        keys = shard(num_keys, tp, rank)
        return HeadShard(range(keys.start * group, keys.stop * group), keys)
    key = rank * num_keys // tp
    sharing = [other for other in range(tp) if other * num_keys // tp == key]
    own = shard(group, len(sharing), rank - sharing[0])
    return HeadShard(range(key * group + own.start, key * group + own.stop), range(key, key + 1))


@cache
def shard_outputs(
    units: tuple[Unit, ...], size: int, num_heads: tuple[int, int], tp: int, rank: int
) -> tuple[range, ...]:
    """Return a rank's outputs, of `size`, of a layer whose sections, one after the other, are made of these units.

    `num_heads`: H and G of the layer's attention.
    """
    heads = shard_heads(*num_heads, tp, rank)
    of_unit = {
        Unit.QUERY_HEAD: (num_heads[0], heads.queries),
        Unit.KEY_VALUE_HEAD: (num_heads[1], heads.keys),
        Unit.QKV_HEAD: (num_heads[0], heads.queries),
    }
    if set(units) == {Unit.CHANNEL}:
        length = size // len(units)
        own = shard_channels(length, tp, rank)
        return tuple(range(i * length + own.start, i * length + own.stop) for i in range(len(units)))
    counts = [of_unit[unit][0] for unit in units]
    width = size // sum(counts)  # of a head, which all sections share
    starts = accumulate([0, *counts[:-1]])
    owns = [of_unit[unit][1] for unit in units]
    return tuple(
        range((start + own.start) * width, (start + own.stop) * width) for start, own in zip(starts, owns, strict=True)
    )


def shard_inputs(inputs: int, num_heads: tuple[int, int] | None, tp: int) -> list[range]:
    """Return each rank's inputs of a layer that reads its attention's heads, H and G of them, or without these a layer's channels."""
    if num_heads is None:
        return [shard_channels(inputs, tp, rank) for rank in range(tp)]
    width = inputs // num_heads[0]
    queries = [shard_heads(*num_heads, tp, rank).queries for rank in range(tp)]
    return [range(own.start * width, own.stop * width) for own in queries]


def stages(layer_bytes: Sequence[int], first_bytes: int, last_bytes: int, pp: int) -> list[range]:
    """Return the layers of each of `pp` stages, at least one each, so that the largest stage has the fewest bytes.

    `first_bytes` come before the layers, with the first stage; `last_bytes` after them, with the last. Raises UserError for more stages
    than layers.
    """
    num_layers = len(layer_bytes)
    if pp > num_layers:
        raise UserError(f"pp={pp} is more than the model's {num_layers} layers: give at most {num_layers}")
    sums = [*accumulate(layer_bytes, initial=first_bytes)]  # of the layers before each border
    sums[0], sums[-1] = 0, sums[-1] + last_bytes
    # the largest stage, and the borders, where the first layers, by their number, are in as many stages as have been looked at
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for stage in range(1, pp + 1):
        ends = range(stage, num_layers - pp + stage + 1)
        best = {
            end: min(
                (max(largest, sums[end] - sums[start]), (*borders, end))
                for start, (largest, borders) in best.items()
                if start < end
            )
            for end in ends
        }
    borders = best[num_layers][1]
    return [range(start, end) for start, end in zip(borders, borders[1:], strict=False)]
