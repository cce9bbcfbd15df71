"""T tokens, N blocks of B slots, H query heads, G key/value heads, D channels per key head (R of them rotated), E per
value head."""

from torch import Tensor

from kernels.kv_format import PagedVectors
from kernels.rms_norm.reference import rms_norm
from kernels.rope.reference import rope


def kv_store(key: Tensor, value: Tensor, key_cache: PagedVectors, value_cache: PagedVectors, slots: Tensor) -> None:
    """Write token t's key and value to slot `slots[t]`, which is block * B + offset, in the caches' format. In place.

    key [T, G, D] and value [T, G, E] have the caches' dtype; slots [T] int64 are distinct.
    """
    for cache, vectors in ((key_cache, key), (value_cache, value)):
        for stored, part in zip(cache.tensors, cache.format.encode(vectors), strict=True):
            stored.flatten(0, 1)[slots] = part


def rope_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: PagedVectors,
    value_cache: PagedVectors,
    slots: Tensor,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys, store keys and values as `kv_store` does, and return the queries [T, H, D].

    query [T, H, D]; cos and sin [T, R/2] and `interleaved` as in `rope`. If query_norm or key_norm [D] is given, every
    head's query or key is normalised with this `rms_norm` weight before the rotation, as in Qwen 3 (arXiv 2505.09388).
    All floats have the caches' dtype.
    """
    query = query if query_norm is None else rms_norm(query, query_norm, eps)
    key = key if key_norm is None else rms_norm(key, key_norm, eps)
    kv_store(rope(key, cos, sin, interleaved), value, key_cache, value_cache, slots)
    return rope(query, cos, sin, interleaved)
