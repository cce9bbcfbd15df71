"""Writes new keys and values into the paged cache, as they are or turned by rotary position embedding.

T tokens, H query heads, G key/value heads, D channels per key head, E per value head.
"""

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.custom_op import custom_op
from kernels.kv_format import PARTS, PagedVectors
from kernels.kv_store import reference
from kernels.rope import angles_fit

__all__ = ["kv_store", "rope_and_store"]

CACHES = {"key_cache": PARTS, "value_cache": PARTS}
WRITTEN = ("key_cache_tensors", "value_cache_tensors")


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.kv_store.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64)
    vectors, angles = (c_void_p,) * 3 + (c_int64,) * 4, (c_void_p, c_void_p, c_int64, c_int32)
    library.rope_and_store.argtypes = vectors + angles + (c_void_p, c_void_p, c_float) + (c_void_p,) * 4 + (c_int64,)
    library.kv_store.restype = library.rope_and_store.restype = None
    return library


@custom_op(lambda *_: None, parts=CACHES, mutates_args=WRITTEN)
def kv_store(key: Tensor, value: Tensor, key_cache: PagedVectors, value_cache: PagedVectors, slots: Tensor) -> None:
    """What `reference.kv_store` says. The heads of a token must lie side by side, or are copied there."""
    if key.is_cuda:
        from kernels.kv_store import triton  # not at the top: a process without a GPU need not load it

        return triton.kv_store(key, value, key_cache, value_cache, slots)
    library, keys, values = build.library(), key_cache.view, value_cache.view
    fit = _fit(key, key_cache, slots) and _fit(value, value_cache, slots)
    if library is None or keys is None or values is None or not fit:
        return reference.kv_store(key, value, key_cache, value_cache, slots)
    key, value, slots = _heads_together(key), _heads_together(value), slots.contiguous()
    _declared(library).kv_store(
        *(key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)),
        *(ctypes.addressof(keys), ctypes.addressof(values), slots.data_ptr(), slots.shape[0]),
    )
    return None


@custom_op(lambda query, *_: query.new_empty(query.shape), parts=CACHES, mutates_args=WRITTEN)
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
    """What `reference.rope_and_store` says, to the bit what `rms_norm`, `rope` and `kv_store` do one after the other."""
    norms = query_norm, key_norm, eps
    if query.is_cuda:
        from kernels.kv_store import triton

        return triton.rope_and_store(query, key, value, cos, sin, key_cache, value_cache, slots, interleaved, *norms)
    library, keys, values = build.library(), key_cache.view, value_cache.view
    fit = _fit(key, key_cache, slots) and _fit(value, value_cache, slots) and angles_fit(query, cos, sin)
    fit = fit and query.dtype == key.dtype and (len(query), query.shape[2]) == (len(key), key.shape[2])
    fit = fit and all(norm is None or norm.shape == key.shape[2:] and norm.dtype == key.dtype for norm in norms[:2])
    if library is None or keys is None or values is None or not fit:
        return reference.rope_and_store(query, key, value, cos, sin, key_cache, value_cache, slots, interleaved, *norms)
    query, key, value = (_heads_together(vectors) for vectors in (query, key, value))
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.contiguous()
    weights = [None if norm is None else norm.contiguous() for norm in norms[:2]]
    out = torch.empty(*query.shape, dtype=query.dtype)
    _declared(library).rope_and_store(
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), query.stride(0), key.stride(0), value.stride(0)),
        *(query.shape[1], cos.data_ptr(), sin.data_ptr(), cos.shape[1], interleaved),
        *(None if weight is None else weight.data_ptr() for weight in weights),
        *(eps, out.data_ptr(), ctypes.addressof(keys), ctypes.addressof(values), slots.data_ptr(), slots.shape[0]),
    )
    return out


def _fit(vectors: Tensor, cache: PagedVectors, slots: Tensor) -> bool:
    """Whether C++ finds in `vectors` and `slots` what it reads of them."""
    shape = len(slots), cache.tensors[0].shape[2], cache.channels
    return (vectors.shape, vectors.dtype, slots.dtype) == (shape, cache.dtype, torch.int64)


def _heads_together(vectors: Tensor) -> Tensor:
    _, head_stride, channel_stride = vectors.stride()
    return vectors if channel_stride == 1 and head_stride == vectors.shape[2] else vectors.contiguous()
