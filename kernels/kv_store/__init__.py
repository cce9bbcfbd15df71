"""Writes new keys and values into the paged cache, optionally after rotary position embedding.

T tokens, H query heads, G key/value heads, D channels per key head, E per value head.
"""

import ctypes

import torch
from torch import Tensor

from kernels.build import Library
from kernels.kv_format import PARTS, Int4, PagedVectors
from kernels.kv_store import reference
from kernels.operator import UnsupportedArguments, operator
from kernels.rope import angles_fit

__all__ = ["kv_store", "rope_and_store"]

CACHES = {"key_cache": PARTS, "value_cache": PARTS}
WRITTEN = ("key_cache_tensors", "value_cache_tensors")


@operator(reference.kv_store, fake=lambda *_: None, has_triton=True, parts=CACHES, mutates_args=WRITTEN)
def kv_store(
    cpp: Library, key: Tensor, value: Tensor, key_cache: PagedVectors, value_cache: PagedVectors, slots: Tensor
) -> None:
    """Write keys and values to their slots, as `reference.kv_store` does. Heads of a token that are not contiguous are
    copied first."""
    keys, values = key_cache.view, value_cache.view
    fit = _fit(key, key_cache, slots) and _fit(value, value_cache, slots)
    if keys is None or values is None or not fit:
        raise UnsupportedArguments
    key, value, slots = _heads_together(key), _heads_together(value), slots.contiguous()
    cpp.kv_store(
        key.data_ptr(),
        value.data_ptr(),
        key.stride(0),
        value.stride(0),
        ctypes.addressof(keys),
        ctypes.addressof(values),
        slots.data_ptr(),
        slots.shape[0],
    )
    return


@operator(
    reference.rope_and_store,
    fake=lambda query, *_: query.new_empty(query.shape),
    has_triton=True,
    parts=CACHES,
    mutates_args=WRITTEN,
)
def rope_and_store(
    cpp: Library,
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
    """Rotate queries and keys, store keys and values, and return the queries. Bit-identical to `rms_norm`, `rope` and
    `kv_store` in sequence."""
    norms = query_norm, key_norm
    keys, values = key_cache.view, value_cache.view
    fit = _fit(key, key_cache, slots) and _fit(value, value_cache, slots) and angles_fit(query, cos, sin)
    fit = fit and query.dtype == key.dtype and (len(query), query.shape[2]) == (len(key), key.shape[2])
    fit = fit and all(norm is None or norm.shape == key.shape[2:] and norm.dtype == key.dtype for norm in norms)
    if keys is None or values is None or not fit:
        raise UnsupportedArguments
    query, key, value = (_heads_together(vectors) for vectors in (query, key, value))
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.contiguous()
    weights = [None if norm is None else norm.contiguous() for norm in norms]
    out = torch.empty(*query.shape, dtype=query.dtype)
    cpp.rope_and_store(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        query.stride(0),
        key.stride(0),
        value.stride(0),
        query.shape[1],
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        interleaved,
        *(None if weight is None else weight.data_ptr() for weight in weights),
        eps,
        out.data_ptr(),
        ctypes.addressof(keys),
        ctypes.addressof(values),
        slots.data_ptr(),
        slots.shape[0],
    )
    return out


def _fit(vectors: Tensor, cache: PagedVectors, slots: Tensor) -> bool:
    heads, stored = cache.tensors[0].shape[2:]
    is_whole = isinstance(cache.format, Int4) or stored == cache.channels
    return is_whole and (vectors.shape, vectors.dtype, slots.dtype) == (
        (len(slots), heads, cache.channels),
        cache.dtype,
        torch.int64,
    )


def _heads_together(vectors: Tensor) -> Tensor:
    _, head_stride, channel_stride = vectors.stride()
    return vectors if channel_stride == 1 and head_stride == vectors.shape[2] else vectors.contiguous()
