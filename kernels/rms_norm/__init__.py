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
from kernels.quantize_rows import quantize_rows
from kernels.rms_norm import reference

__all__ = ["add_rms_norm", "add_rms_norm_quantize", "rms_norm", "rms_norm_quantize"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.rms_norm.argtypes = (c_void_p,) * 7 + (c_int32, c_int64, c_int64, c_float)
    library.rms_norm.restype = None
    return library


@custom_op(reference.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `reference.rms_norm` says. A row's bits depend on that row alone."""
    if x.is_cuda:
        from kernels.rms_norm import triton  # not at the top: a process without a GPU need not load it

        return triton.rms_norm(x, weight, eps)
    library = _library(x, weight)
    if library is None:
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(*x.shape, dtype=x.dtype)
    _normalise(library, x, None, weight, eps, out=out)
    return out


@custom_op(reference.add_rms_norm)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `reference.add_rms_norm` says, to the bit `rms_norm` of torch's sum. A row's bits depend on that row of both alone."""
    if x.is_cuda:
        from kernels.rms_norm import triton

        return triton.add_rms_norm(x, residual, weight, eps)
    library = _library(x, weight, residual)
    if library is None:
        return reference.add_rms_norm(x, residual, weight, eps)
    out, total = (torch.empty(*x.shape, dtype=x.dtype) for _ in range(2))
    _normalise(library, x, residual, weight, eps, out=out, total=total)
    return out, total


@custom_op(reference.rms_norm_quantize)
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, group_size: int | None
) -> tuple[Tensor, Tensor]:
    """What `reference.rms_norm_quantize` says, on a CPU to the bit `quantize_rows` of `rms_norm`. One pass, there of int8 alone."""
    if x.is_cuda:
        from kernels.rms_norm import triton

        return triton.rms_norm_quantize(x, weight, eps, dtype, group_size)
    library = _library(x, weight)
    if library is None or (dtype, group_size) != (torch.int8, None):
        return quantize_rows(rms_norm(x, weight, eps), dtype, group_size)
    codes, scales = torch.empty(x.shape, dtype=dtype), torch.empty(len(x), 1)
    _normalise(library, x, None, weight, eps, codes=codes, scales=scales)
    return codes, scales


@custom_op(reference.add_rms_norm_quantize)
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, group_size: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What `reference.add_rms_norm_quantize` says, on a CPU to the bit `quantize_rows` of `add_rms_norm`. One pass, there of int8 alone."""
    if x.is_cuda:
        from kernels.rms_norm import triton

        return triton.add_rms_norm_quantize(x, residual, weight, eps, dtype, group_size)
    library = _library(x, weight, residual)
    if library is None or (dtype, group_size) != (torch.int8, None):
        normed, total = add_rms_norm(x, residual, weight, eps)
        return *quantize_rows(normed, dtype, group_size), total
    codes, scales, total = (
        torch.empty(x.shape, dtype=dtype),
        torch.empty(len(x), 1),
        torch.empty(x.shape, dtype=x.dtype),
    )
    _normalise(library, x, residual, weight, eps, total=total, codes=codes, scales=scales)
    return codes, scales, total


def _library(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> ctypes.CDLL | None:
    """None where it cannot compute with these."""
    library = build.library()
    fits = x.dtype in build.DTYPES and weight.dtype == x.dtype and x.is_cpu and weight.shape == x.shape[-1:]
    if residual is not None:
        fits = fits and residual.dtype == x.dtype and residual.shape == x.shape
    return _declared(library) if library is not None and fits else None


def _normalise(
    library: ctypes.CDLL,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    total: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Fills what of the last four is there."""
    x, weight, residual = x.contiguous(), weight.contiguous(), None if residual is None else residual.contiguous()
    tensors, channels = (x, residual, weight, out, total, codes, scales), x.shape[-1]
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    library.rms_norm(*pointers, build.DTYPES[x.dtype], x.shape[:-1].numel(), channels, eps)
