"""paged_attention compared with attention in plain loops in float64, over a cache that is full of NaN where nothing was
written."""

import math

import torch

from kernels.kv_format import PagedVectors, Unquantised
from kernels.paged_attention import paged_attention
from tests.helpers.cases import each
from tests.helpers.ways import any_way, computing, every_way
from tests.helpers.written_attention import Options, written_out

BLOCK_SIZE = 4


def check(
    lengths: list[tuple[int, int]], heads: int, groups: int, head_dim: int, value_dim: int, options: Options
) -> None:
    """Compare one call. `lengths`: (new tokens, all tokens) per sequence."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = sum(math.ceil(total / BLOCK_SIZE) for _, total in lengths) + 3
    # every permutation of blocks must give the same result
    free = torch.randperm(num_blocks, generator=generator).tolist()
    key_cache = torch.full((num_blocks, BLOCK_SIZE, groups, head_dim), torch.nan)
    value_cache = torch.full((num_blocks, BLOCK_SIZE, groups, value_dim), torch.nan)
    scale, queries, expected, tables = head_dim**-0.5, [], [], []
    for s, (new, total) in enumerate(lengths):
        keys = torch.randn(total, groups, head_dim, generator=generator)
        values = torch.randn(total, groups, value_dim, generator=generator)
        query = torch.randn(new, heads, head_dim, generator=generator)
        table = [free.pop() for _ in range(math.ceil(total / BLOCK_SIZE))]
        slots = torch.tensor(
            [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(total)], dtype=torch.int64
        )
        key_cache.flatten(0, 1)[slots], value_cache.flatten(0, 1)[slots] = keys, values
        queries.append(query)
        expected.append(written_out(query, keys, values, scale, s, options))
        tables.append(table)
    width = max(map(len, tables))
    inputs = (
        torch.cat(queries),
        PagedVectors((key_cache,), Unquantised(), head_dim, torch.float32),
        PagedVectors((value_cache,), Unquantised(), value_dim, torch.float32),
        torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        torch.tensor([0, *torch.tensor([new for new, _ in lengths]).cumsum(0).tolist()]),
        torch.tensor([total for _, total in lengths]),
        scale,
    )
    for way in every_way():  # including torch's, with which the other ones are compared
        with computing(way):
            # float32 sums of at most 128 terms
            result = paged_attention(*inputs, **options).double()
            torch.testing.assert_close(result, torch.cat(expected), rtol=0, atol=2e-6, equal_nan=True)


RAGGED = [(1, 64), (5, 5), (0, 9), (1, 1), (7, 29), (4, 8)]


@each("head_dim", [8, 64, 80, 128])
@each("heads, groups", [(4, 4), (4, 1), (8, 1), (6, 2)])
@each("lengths", [[(1, 1)], [(63, 63)], RAGGED])
def test_equals_attention_written_out(head_dim: int, heads: int, groups: int, lengths: list[tuple[int, int]]) -> None:
    check(lengths, heads, groups, head_dim, head_dim, {})


@each(
    "options",
    [
        {"soft_cap": 0.7, "chunk": 5},
        {"window": 1},
        {"window": 6},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
        {"prefix_lengths": torch.tensor([10, 3, 9, 7, 29, 0])},
        {"sinks": torch.tensor([0.5, -200.0, 200.0, 3.0])},
        {"sinks": torch.tensor([math.inf, -math.inf, math.nan, -1.0]), "window": 6},
        {"soft_cap": 2.0, "window": 9, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    ],
)
@each("groups", [1, 2])
def test_options_equal_attention_written_out(options: Options, groups: int) -> None:
    check(RAGGED, 4, groups, 16, 16, options)


def test_sequences_without_new_tokens() -> None:
    check([(0, 5), (3, 9), (0, 0), (0, 4), (1, 1)], 4, 2, 24, 24, {})
    check([(0, 5), (0, 1)], 4, 2, 24, 24, {})


@any_way
def test_numbers_that_do_not_lie_side_by_side() -> None:
    """The memory between them must not be read."""
    caches = [PagedVectors((torch.randn(6, BLOCK_SIZE, 1, 16),), Unquantised(), 16, torch.float32) for _ in range(2)]
    query, tables = torch.randn(3, 2, 16), torch.tensor([[3, 0], [4, 5]])
    numbers = [torch.tensor([0, 2, 3]), torch.tensor([2, 7])]
    slopes, sinks = torch.tensor([0.5, 0.25]), torch.tensor([1.0, -0.5])
    options = {"alibi_slopes": slopes, "prefix_lengths": torch.tensor([0, 7]), "sinks": sinks}

    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, torch.full_like(x, 10**6)), -1)[..., 0]

    expected = paged_attention(query, *caches, tables, *numbers, 0.25, **options)
    options = {name: apart(option) for name, option in options.items()}
    result = paged_attention(query, *caches, apart(tables), *map(apart, numbers), 0.25, **options)
    assert torch.equal(result, expected)


def test_values_may_have_fewer_channels_than_keys() -> None:
    check(RAGGED, 4, 1, 24, 10, {})


@any_way
@each("bad", [math.nan, math.inf])
@each("options", [{}, {"window": 3}, {"prefix_lengths": torch.tensor([2])}])
def test_masked_values_may_be_anything(options: Options, bad: float) -> None:
    """Its weight is 0; 0 times a value that is not finite would be NaN."""
    caches = [PagedVectors((torch.randn(3, BLOCK_SIZE, 2, 8),), Unquantised(), 8, torch.float32) for _ in range(2)]
    query, numbers = torch.randn(9, 4, 8), (torch.tensor([[1, 0, 2]]), torch.tensor([0, 9]), torch.tensor([9]))
    expected = paged_attention(query, *caches, *numbers, 0.3, **options)
    caches[1].tensors[0][0, 1, 1, 5] = bad  # position 5, of the second group
    result = paged_attention(query, *caches, *numbers, 0.3, **options)
    sees = torch.arange(9) >= 5
    if "window" in options:
        sees &= torch.arange(9) < 8
    assert not result[sees][:, 2:, 5].isfinite().any()
    torch.testing.assert_close(result[~sees], expected[~sees], rtol=0, atol=1e-6)  # another order of sums
