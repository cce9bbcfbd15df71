"""The attention kernel against the reference, over caches full of NaN where nothing was written."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.kv_format import KVFormat, PagedVectors, allocate
from kernels.kv_store.reference import kv_store
from kernels.paged_attention import reference, triton
from tests.helpers.cache_formats import NAMES, formats_of
from tests.helpers.triton_cases import DEVICE, assert_near, noise

BLOCK_SIZE = 4
RAGGED = [(1, 40), (5, 5), (0, 9), (1, 1), (7, 29), (17, 19)]  # (new tokens, all tokens) of each sequence
NANS = {torch.uint8: 255, torch.int8: -128}


def on(device: str, cache: PagedVectors, format: KVFormat) -> PagedVectors:
    return replace(cache, tensors=tuple(part.to(device) for part in cache.tensors), format=format)


def check(
    lengths: list[tuple[int, int]],
    heads: int,
    groups: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_cache: str = "none",
    padding: int = 0,
    **options: Any,
) -> None:
    """`padding` rows and sequences follow, as a captured graph has them."""
    value_dim = head_dim if value_dim is None else value_dim
    num_blocks = sum(math.ceil(total / BLOCK_SIZE) for _, total in lengths) + 3
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    width = max(math.ceil(total / BLOCK_SIZE) for _, total in lengths)
    tables = torch.zeros(len(lengths) + padding, width, dtype=torch.int64)
    caches = []
    for format, channels in zip(formats_of(kv_cache, groups), (head_dim, value_dim), strict=True):
        caches.append(allocate(format, (num_blocks, BLOCK_SIZE, groups), channels, dtype, torch.device("cpu")))
        for part in caches[-1].tensors:
            part.copy_(torch.full(part.shape, NANS.get(part.dtype, math.nan)))
    for s, (_, total) in enumerate(lengths):
        for i in range(math.ceil(total / BLOCK_SIZE)):
            tables[s, i] = free.pop()
        slots = torch.tensor([int(tables[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(total)])
        key = noise(total, groups, head_dim, dtype=dtype, seed=s)
        kv_store(key, noise(total, groups, value_dim, dtype=dtype, seed=s + 99), *caches, slots)
    num_new = [new for new, _ in lengths]
    starts = torch.tensor([0, *num_new, *[0] * padding]).cumsum(0)
    contexts = torch.tensor([total for _, total in lengths] + [0] * padding)
    query = noise(sum(num_new) + padding, heads, head_dim, dtype=dtype, seed=7)
    scale = head_dim**-0.5
    count = len(lengths)
    expected = reference.paged_attention(
        query[: sum(num_new)], *caches, tables[:count], starts[: count + 1], contexts[:count], scale, **options
    )
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    result = triton.paged_attention(
        query.to(DEVICE),
        *map(on, [DEVICE] * 2, caches, formats_of(kv_cache, groups, DEVICE)),
        tables.to(DEVICE),
        starts.to(DEVICE),
        contexts.to(DEVICE),
        scale,
        **moved,
    )
    assert_near(result[: sum(num_new)], expected)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 1), (6, 2)], ids=["gqa1", "gqa4", "gqa3"])
@pytest.mark.parametrize("lengths", [[(1, 1)], [(17, 17)], RAGGED], ids=["T1", "T17", "ragged"])
def test_equals_the_reference(head_dim: int, heads: int, groups: int, lengths: list[tuple[int, int]]) -> None:
    check(lengths, heads, groups, head_dim)


@pytest.mark.parametrize("kv_cache", NAMES)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 16), (torch.float16, 16), (torch.bfloat16, 80)], ids=str
)
def test_reads_every_format_of_the_cache(kv_cache: str, dtype: torch.dtype, head_dim: int) -> None:
    check(RAGGED, 4, 2, head_dim, dtype=dtype, kv_cache=kv_cache)


@pytest.mark.parametrize(
    "options",
    [
        {"soft_cap": 0.7},
        {"window": 1},
        {"window": 6},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
        {"prefix_lengths": torch.tensor([10, 3, 9, 1, 29, 0])},
        {"prefix_lengths": torch.tensor([60, 9, 2, 1, 25, 19])},  # also of tokens still to come
        {"soft_cap": 2.0, "window": 9, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    ],
    ids=lambda options: "+".join(options),
)
def test_options(options: dict[str, Any]) -> None:
    check(RAGGED, 4, 2, 16, **options)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 10), (48, 32), (80, 64)])
def test_values_of_other_width_than_keys(key_dim: int, value_dim: int) -> None:
    check(RAGGED, 20, 1, key_dim, value_dim)  # more heads than a tile has rows


@pytest.mark.parametrize("kv_cache", ["none", "int4"])
@pytest.mark.parametrize("options", [{}, {"window": 200}], ids=["all", "window"])
def test_long_sequences_are_split(kv_cache: str, options: dict[str, Any]) -> None:
    """1,100 positions have up to eight parts; the other sequence has nothing in most of them."""
    assert triton.num_splits(6, 1100) == 8
    check([(1, 1100), (2, 3)], 4, 1, 16, kv_cache=kv_cache, **options)


def test_padding_of_a_graph_changes_nothing() -> None:
    check([(1, 9), (1, 3)], 4, 2, 16, padding=3)
    check([(1, 600), (1, 3)], 4, 2, 16, padding=3)


def test_the_number_of_parts() -> None:
    assert triton.num_splits(1, 100) == 1
    assert triton.num_splits(1000, 100_000) == 1
    assert triton.num_splits(100, 8192) == 4  # 264 / 100 is 3 programs, rounded up to a power of 2
    assert triton.num_splits(1, 100_000) == 64
