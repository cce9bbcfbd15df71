"""kv_store writes where the slots say, and nowhere else."""

import torch

from kernels.kv_format import PagedVectors, Unquantised
from kernels.kv_store import kv_store


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
