"""kv_store writes where the slots say, and nowhere else."""

from collections.abc import Callable

import pytest
import torch

from kernels.kv_format import PagedVectors, Unquantised, allocate
from kernels.kv_store import kv_store, reference
from tests.kernels.cache_formats import NAMES, formats_of


def test_writes_slots_and_nothing_else() -> None:
    key_cache, value_cache = torch.full((2, 5, 4, 2, 8), torch.nan)  # N=5 blocks of B=4 slots
    slots = torch.tensor([19, 0, 7])
    key, value = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    caches = [PagedVectors((cache,), Unquantised(), 8, torch.float32) for cache in (key_cache, value_cache)]
    kv_store(key, value, *caches, slots)
    for cache, new in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[4, 3], new[0])
        assert torch.equal(cache[0, 0], new[1])
        assert torch.equal(cache[1, 3], new[2])
        assert cache.isnan().sum() == (5 * 4 - 3) * 2 * 8


@pytest.mark.parametrize("channels", [8, 17, 64, 80, 576])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_compiled_one_stores_the_same_bits(
    compiled: Callable[[int], None], name: str, dtype: torch.dtype, channels: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(1000, 3, 2 * channels, generator=generator).to(
        dtype
    )  # key and value of a token beside each other
    fused *= torch.logspace(-9, 4, 1000)[:, None, None].to(dtype)
    fused[5], fused[6, 1, 3], fused[7, 2, 1] = 0, torch.nan, -torch.inf
    key, value = fused[..., :channels].contiguous(), fused[..., channels:]
    slots = torch.randperm(1600, generator=generator)[:1000]
    stored = []
    for store in (reference.kv_store, kv_store):
        compiled(3)
        caches = [
            allocate(format, (100, 16, 3), channels, dtype, torch.device("cpu")) for format in formats_of(name, 3)
        ]
        tensors = caches[0].tensors + caches[1].tensors
        for part in tensors:
            part.copy_(torch.full(part.shape, torch.nan if part.dtype.is_floating_point else 99.0))
        store(key, value, caches[0], caches[1], slots)
        stored.append([part.float() if part.dtype == torch.float8_e4m3fn else part for part in tensors])
    for expected, part in zip(*stored, strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)
