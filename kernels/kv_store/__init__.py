"""Writes new keys and values into the paged cache.

T tokens, G key/value heads, D channels per key head, E per value head.
"""

import ctypes
import functools
from ctypes import c_int64, c_void_p

from torch import Tensor

from kernels import build
from kernels.custom_op import custom_op
from kernels.kv_format import PARTS, PagedVectors
from kernels.kv_store import reference

__all__ = ["kv_store"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.kv_store.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64)
    library.kv_store.restype = None
    return library


@custom_op(
    lambda *_: None,
    parts={"key_cache": PARTS, "value_cache": PARTS},
    mutates_args=("key_cache_tensors", "value_cache_tensors"),
)
def kv_store(key: Tensor, value: Tensor, key_cache: PagedVectors, value_cache: PagedVectors, slots: Tensor) -> None:
    """What `reference.kv_store` says. The heads of a token must lie side by side, or are copied there."""
    if key.is_cuda:
        from kernels.kv_store import triton  # not at the top: a process without a GPU need not load it

        return triton.kv_store(key, value, key_cache, value_cache, slots)
    library, keys, values = build.library(), key_cache.view, value_cache.view
    if library is None or keys is None or values is None or key.dtype != key_cache.dtype:
        return reference.kv_store(key, value, key_cache, value_cache, slots)
    key, value = _heads_together(key), _heads_together(value)
    _declared(library).kv_store(
        *(key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)),
        *(ctypes.addressof(keys), ctypes.addressof(values), slots.data_ptr(), slots.shape[0]),
    )
    return None


def _heads_together(vectors: Tensor) -> Tensor:
    _, head_stride, channel_stride = vectors.stride()
    return vectors if channel_stride == 1 and head_stride == vectors.shape[2] else vectors.contiguous()
