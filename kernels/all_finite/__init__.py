"""Which rows hold finite numbers alone."""

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.all_finite import reference
from kernels.custom_op import custom_op

__all__ = ["all_finite"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.all_finite.argtypes, library.all_finite.restype = (c_void_p, c_int32, c_int64, c_int64, c_void_p), None
    return library


@custom_op(reference.all_finite)
def all_finite(x: Tensor) -> Tensor:
    """Return what `reference.all_finite` says: bool [R], from x [R, C]."""
    library, dtype = build.library(), build.DTYPES.get(x.dtype)
    if library is None or dtype is None or not x.is_cpu:
        return reference.all_finite(x)
    x = x.contiguous()
    out = torch.empty(x.shape[0], dtype=torch.bool)
    _declared(library).all_finite(x.data_ptr(), dtype, *x.shape, out.data_ptr())
    return out
