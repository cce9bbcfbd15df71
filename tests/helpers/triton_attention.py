"""Paged attention on a GPU compared with its reference."""

import math
from dataclasses import replace
from typing import Any

import torch

from kernels.kv_format import KVFormat, PagedVectors, allocate
from kernels.kv_store.reference import kv_store
from kernels.paged_attention import reference, triton
from tests.helpers.cache_formats import formats_of
from tests.helpers.triton_cases import DEVICE, assert_near, noise

BLOCK_SIZE = 4
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
    """Compare one call. `padding`: padding rows and sequences at the end, as in a captured graph."""
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
