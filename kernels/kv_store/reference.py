"""T tokens, N blocks of B slots, G key/value heads, D channels per key head, E per value head."""

from torch import Tensor

from kernels.kv_format import PagedVectors


def kv_store(key: Tensor, value: Tensor, key_cache: PagedVectors, value_cache: PagedVectors, slots: Tensor) -> None:
    """Write token t's key and value to slot `slots[t]`, which is block * B + offset, in the caches' format. In place.

    key [T, G, D] and value [T, G, E] in the caches' dtype; slots [T] int64, all different.
    """
    for cache, vectors in ((key_cache, key), (value_cache, value)):
        for stored, part in zip(cache.tensors, cache.format.encode(vectors), strict=True):
            stored.flatten(0, 1)[slots] = part
