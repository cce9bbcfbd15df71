"""The ranks' shards cover everything exactly, for any numbers of heads, channels, layers and ranks."""

import itertools
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conf.errors import UserError
from models.layout import Unit
from models.sharding import STEP, Shard, shard_channels, shard_heads, shard_outputs, stages

COUNTS = st.integers(1, 12)


@given(num_keys=COUNTS, group=COUNTS, tp=st.integers(1, 40))
def test_every_query_is_of_one_rank_with_the_keys_that_it_reads(num_keys: int, group: int, tp: int) -> None:
    assume(tp <= num_keys * group)
    ranks = [shard_heads(num_keys * group, num_keys, tp, rank) for rank in range(tp)]
    assert [query for rank in ranks for query in rank.queries] == list(range(num_keys * group))
    for rank in ranks:
        assert rank.queries
        assert list(rank.keys) == sorted({query // group for query in rank.queries})
        assert len(rank.queries) % len(rank.keys) == 0  # as attention requires
        assert tp < num_keys or len(rank.keys) == 1
    sizes = [len(rank.queries) for rank in ranks]
    assert max(sizes) - min(sizes) <= max(1, group)


def test_of_qwen2_7b_two_ranks_share_a_key() -> None:
    ranks = [shard_heads(28, 4, 8, rank) for rank in range(8)]
    assert [(len(rank.queries), *rank.keys) for rank in ranks] == [
        (3, 0), (4, 0), (3, 1), (4, 1), (3, 2), (4, 2), (3, 3), (4, 3),
    ]  # fmt: skip


@given(total=st.integers(1, 600), tp=st.integers(1, 20))
def test_every_channel_is_of_one_rank(total: int, tp: int) -> None:
    assume(tp <= total)
    ranks = [shard_channels(total, tp, rank) for rank in range(tp)]
    assert [channel for rank in ranks for channel in rank] == list(range(total))
    assert all(ranks)
    steps = [-(-len(rank) // STEP) for rank in ranks]
    assert max(steps) - min(steps) <= 1
    if total >= STEP * tp:
        assert all(rank.start % STEP == 0 for rank in ranks)


SECTIONS = [
    ((Unit.QUERY_HEAD,), lambda h, g: h),
    ((Unit.QUERY_HEAD, Unit.KEY_VALUE_HEAD, Unit.KEY_VALUE_HEAD), lambda h, g: h + 2 * g),
    ((Unit.QKV_HEAD,), lambda h, g: h),
]


@given(num_keys=COUNTS, group=COUNTS, width=st.integers(1, 5), tp=COUNTS, which=st.sampled_from(SECTIONS))
def test_sections_of_heads(num_keys: int, group: int, width: int, tp: int, which: object) -> None:
    """Each section is sharded like its heads."""
    num_queries = num_keys * group
    assume(tp <= num_queries)
    units, total = which  # type: ignore[misc]
    if units == (Unit.QKV_HEAD,):
        assume(group == 1)
    size = width * total(num_queries, num_keys)
    for rank in range(tp):
        heads, ranges = (
            shard_heads(num_queries, num_keys, tp, rank),
            shard_outputs(units, size, (num_queries, num_keys), tp, rank),
        )
        before = 0
        for unit, outputs in zip(units, ranges, strict=True):
            head_range, count = (heads.keys, num_keys) if unit is Unit.KEY_VALUE_HEAD else (heads.queries, num_queries)
            assert [*outputs] == [before + head * width + i for head in head_range for i in range(width)]
            before += count * width


@given(length=st.integers(1, 200), sections=st.integers(1, 3), tp=COUNTS)
def test_sections_of_channels(length: int, sections: int, tp: int) -> None:
    assume(tp <= length)
    for rank in range(tp):
        ranges = shard_outputs((Unit.CHANNEL,) * sections, length * sections, (tp, tp), tp, rank)
        channels = shard_channels(length, tp, rank)
        assert ranges == tuple(range(i * length + channels.start, i * length + channels.stop) for i in range(sections))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(0, 20), st.integers(0, 20), st.integers(1, 7))
def test_no_borders_make_the_largest_stage_smaller(layers: list[int], first: int, last: int, pp: int) -> None:
    assume(pp <= len(layers))
    sizes = [first + layers[0], *layers[1:]]
    sizes[-1] += last

    def largest(borders: tuple[int, ...]) -> int:
        ends = [0, *borders, len(layers)]
        return max(sum(sizes[start:end]) for start, end in itertools.pairwise(ends))

    stage_ranges = stages(layers, first, last, pp)
    assert [layer for stage in stage_ranges for layer in stage] == list(range(len(layers)))
    assert all(stage_ranges)
    every = itertools.combinations(range(1, len(layers)), pp - 1)
    assert largest(tuple(stage.start for stage in stage_ranges[1:])) == min(map(largest, every))


def test_embedding_and_head_count() -> None:
    """A vocabulary with the bytes of three layers is at both ends, so the inner stages get more layers."""
    assert [len(stage) for stage in stages([1] * 10, 3, 3, 4)] == [1, 4, 4, 1]


def test_layers_that_share_keys_and_values_are_in_one_stage() -> None:
    shared = {5: 3, 6: 3, 7: 4}
    assert stages([1] * 8, 0, 0, 2, shared) == [range(3), range(3, 8)]
    assert stages([1] * 8, 0, 0, 3, {7: 6}) == [range(2), range(2, 5), range(5, 8)]
    with pytest.raises(UserError, match="pp=5 is more than the model's 4 parts, whose layers share keys and values"):
        stages([1] * 8, 0, 0, 5, shared)


def test_the_shape_of_a_part() -> None:
    assert Shard(1, (range(2, 4), range(7, 8))).shape((5, 9, 4)) == (5, 3, 4)


def test_too_few_heads_channels_or_layers_are_refused() -> None:
    with pytest.raises(UserError, match="tp=5 is more than the 4 query heads of this model: give at most 4"):
        shard_heads(4, 2, 5, 0)
    with pytest.raises(UserError, match="tp=3 is more than the 2 channels of a layer of this model: give at most 2"):
        shard_channels(2, 3, 0)
    with pytest.raises(UserError, match=re.escape("pp=3 is more than the model's 2 layers: give at most 2")):
        stages([1, 1], 0, 0, 3)
