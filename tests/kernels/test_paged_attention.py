"""paged_attention against attention written out token by token in float64, over a cache full of NaN where nothing was written."""

import math

import pytest
import torch

from kernels.paged_attention import paged_attention

BLOCK_SIZE = 4


def written_out(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """query [Q, H, D] are the last of the L tokens of keys and values [L, G, D]."""
    result = torch.zeros(query.shape, dtype=torch.float64)
    first, heads_per_group = len(keys) - len(query), query.shape[1] // keys.shape[1]
    for i in range(len(query)):
        for h in range(query.shape[1]):
            seen = slice(0, first + i + 1)
            scores = keys[seen, h // heads_per_group].double() @ query[i, h].double() * scale
            weights = (scores - scores.max()).exp()
            result[i, h] = (weights / weights.sum()) @ values[seen, h // heads_per_group].double()
    return result


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 1), (8, 1), (6, 2)], ids=["gqa1", "gqa4", "gqa8", "gqa3"])
@pytest.mark.parametrize(
    "lengths",
    [[(1, 1)], [(63, 63)], [(1, 64), (5, 5), (1, 1), (7, 29), (4, 8)]],  # (new tokens, all tokens) per sequence
    ids=["T1", "T63", "ragged"],
)
def test_equals_attention_written_out(head_dim: int, heads: int, groups: int, lengths: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    num_blocks = sum(math.ceil(total / BLOCK_SIZE) for _, total in lengths) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()  # any permutation of blocks must give the same
    key_cache, value_cache = torch.full((2, num_blocks, BLOCK_SIZE, groups, head_dim), torch.nan)
    scale, queries, expected, tables = head_dim**-0.5, [], [], []
    for new, total in lengths:
        keys, values = torch.randn(2, total, groups, head_dim, generator=generator)
        query = torch.randn(new, heads, head_dim, generator=generator)
        table = [free.pop() for _ in range(math.ceil(total / BLOCK_SIZE))]
        slots = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(total)])
        key_cache.flatten(0, 1)[slots], value_cache.flatten(0, 1)[slots] = keys, values
        queries.append(query)
        expected.append(written_out(query, keys, values, scale))
        tables.append(table)
    width = max(map(len, tables))
    result = paged_attention(
        torch.cat(queries),
        key_cache,
        value_cache,
        torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        torch.tensor([0, *torch.tensor([new for new, _ in lengths]).cumsum(0).tolist()]),
        torch.tensor([total for _, total in lengths]),
        scale,
    )
    torch.testing.assert_close(
        result.double(), torch.cat(expected), rtol=0, atol=2e-6
    )  # float32 sums of at most 128 terms
