"""Writes new keys and values into the paged cache."""

from torch import Tensor

from kernels.kv_format import PagedVectors
from kernels.kv_store import reference

__all__ = ["kv_store"]


def kv_store(key: Tensor, value: Tensor, key_cache: PagedVectors, value_cache: PagedVectors, slots: Tensor) -> None:
    """See kernels/kv_store/reference.py."""
    if key.is_cuda:
        from kernels.kv_store import triton

        triton.kv_store(key, value, key_cache, value_cache, slots)
    else:
        reference.kv_store(key, value, key_cache, value_cache, slots)
