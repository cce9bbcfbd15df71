"""Root mean square normalisation.

T tokens, D channels.
"""

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.rms_norm import reference

__all__ = ["add_rms_norm", "rms_norm"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.rms_norm.argtypes = (c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_float)
    library.rms_norm.restype = None
    return library


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `reference.rms_norm` says. A row's bits depend on that row alone."""
    if x.is_cuda:
        from kernels.rms_norm import triton  # not at the top: a process without a GPU need not load it

        return triton.rms_norm(x, weight, eps)
    library, dtype, shape = build.library(), build.DTYPES.get(x.dtype), x.shape
    if library is None or dtype is None or weight.dtype != x.dtype or not x.is_cpu:
        return reference.rms_norm(x, weight, eps)
    x, channels = x.contiguous(), shape[-1]
    out = torch.empty(*shape, dtype=x.dtype)
    _declared(library).rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), dtype, x.numel() // channels, channels, eps
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See kernels/rms_norm/reference.py."""
    if x.is_cuda:
        from kernels.rms_norm import triton

        return triton.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)
