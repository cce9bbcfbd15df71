"""The attention kernel compared with the reference, over caches that are full of NaN where nothing was written."""

from itertools import product
from typing import Any

import torch

from kernels.paged_attention import triton
from tests.helpers.cache_formats import NAMES
from tests.helpers.cases import each
from tests.helpers.triton_attention import check
from tests.helpers.triton_cases import tiers

SINKS = torch.tensor([0.5, -torch.inf, torch.inf, 4.0])
RAGGED = [(1, 40), (5, 5), (0, 9), (1, 1), (7, 29), (17, 19)]  # (new tokens, all tokens) of each sequence


@tiers("lengths, heads_and_groups, head_dim", [RAGGED, [(1, 1)], [(17, 17)]], [(4, 1), (2, 2), (6, 2)], [80, 16, 64])
def test_equals_the_reference(lengths: list[tuple[int, int]], heads_and_groups: tuple[int, int], head_dim: int) -> None:
    check(lengths, *heads_and_groups, head_dim)


@tiers("kv_cache, numbers", NAMES, [(torch.bfloat16, 80), (torch.float32, 16), (torch.float16, 16)])
def test_reads_every_format_of_the_cache(kv_cache: str, numbers: tuple[torch.dtype, int]) -> None:
    dtype, head_dim = numbers
    check(RAGGED, 4, 2, head_dim, dtype=dtype, kv_cache=kv_cache)


@each(
    "options",
    [
        {"soft_cap": 0.7, "chunk": 5},
        {"window": 1},
        {"window": 6},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
        {"prefix_lengths": torch.tensor([10, 3, 9, 1, 29, 0])},
        {"prefix_lengths": torch.tensor([60, 9, 2, 1, 25, 19])},  # also of later tokens
        {"soft_cap": 2.0, "window": 9, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
        {"sinks": torch.tensor([0.5, -3.0, 4.0, 9.0]), "window": 6},
        {"sinks": torch.tensor([torch.inf, -torch.inf, -1.0, 200.0])},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    check(RAGGED, 4, 2, 16, **options)


@each("key_dim, value_dim", [(24, 10), (48, 32), (80, 64)])
def test_values_of_other_width_than_keys(key_dim: int, value_dim: int) -> None:
    check([(1, 40), (0, 9), (3, 5)], 36, 1, key_dim, value_dim)  # more heads than a tile has rows


@each("kv_cache, options", product(["none", "int4"], [{"chunk": 500}, {"window": 200, "sinks": SINKS}]))
def test_long_sequences_are_split(kv_cache: str, options: dict[str, Any]) -> None:
    """520 positions have four splits; most splits of the other sequence are empty."""
    assert triton.num_splits(2, 520) == 4
    check([(1, 520), (2, 3)], 4, 1, 16, kv_cache=kv_cache, **options)


def test_padding_of_a_graph_changes_nothing() -> None:
    check([(1, 9), (1, 3)], 4, 2, 16, padding=3)
    check([(1, 520), (1, 3)], 4, 2, 16, padding=3)


def test_the_number_of_parts() -> None:
    assert triton.num_splits(1, 100) == 1
    assert triton.num_splits(1000, 100_000) == 1
    assert triton.num_splits(100, 8192) == 4  # 264 / 100 is 3 programs, rounded up to a power of 2
    assert triton.num_splits(1, 100_000) == 64
