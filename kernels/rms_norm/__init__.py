"""Root mean square normalisation.

T tokens, D channels.
"""

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.custom_op import custom_op
from kernels.rms_norm import reference

__all__ = ["add_rms_norm", "rms_norm"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    sizes = (c_int32, c_int64, c_int64, c_float)
    library.rms_norm.argtypes = (c_void_p,) * 3 + sizes
    library.add_rms_norm.argtypes = (c_void_p,) * 5 + sizes
    library.rms_norm.restype = library.add_rms_norm.restype = None
    return library


@custom_op(reference.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `reference.rms_norm` says. A row's bits depend on that row alone."""
    if x.is_cuda:
        from kernels.rms_norm import triton  # not at the top: a process without a GPU need not load it

        return triton.rms_norm(x, weight, eps)
    library, dtype = _library(x, weight), build.DTYPES.get(x.dtype)
    if library is None or dtype is None:
        return reference.rms_norm(x, weight, eps)
    x, weight, channels = x.contiguous(), weight.contiguous(), x.shape[-1]
    out = torch.empty(*x.shape, dtype=x.dtype)
    library.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), dtype, x.shape[:-1].numel(), channels, eps)
    return out


@custom_op(reference.add_rms_norm)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `reference.add_rms_norm` says, to the bit `rms_norm` of torch's sum. A row's bits depend on that row of both alone."""
    if x.is_cuda:
        from kernels.rms_norm import triton

        return triton.add_rms_norm(x, residual, weight, eps)
    library, dtype = _library(x, weight), build.DTYPES.get(x.dtype)
    if library is None or dtype is None or residual.dtype != x.dtype or residual.shape != x.shape:
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual, weight, channels = x.contiguous(), residual.contiguous(), weight.contiguous(), x.shape[-1]
    out, total = (torch.empty(*x.shape, dtype=x.dtype) for _ in range(2))
    library.add_rms_norm(
        *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(), dtype),
        *(x.shape[:-1].numel(), channels, eps),
    )
    return out, total


def _library(x: Tensor, weight: Tensor) -> ctypes.CDLL | None:
    library = build.library()
    return None if library is None or weight.dtype != x.dtype or not x.is_cpu else _declared(library)
