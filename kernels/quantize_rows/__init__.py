"""Rows of activations as codes of 8 bits, each row or each group of its inputs with the scale that its largest number wants.

M rows, K inputs.
"""

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.custom_op import custom_op
from kernels.quantize_rows import reference
from kernels.quantize_rows.rows import QuantizedRows, RowCodes, Rows

__all__ = ["QuantizedRows", "RowCodes", "Rows", "quantize_rows"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.quantize_rows.argtypes = (c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_int64)
    library.quantize_rows.restype = None
    return library


@custom_op(reference.quantize_rows)
def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.int8, group_size: int | None = None, static_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What `reference.quantize_rows` says. A row's bits depend on that row alone."""
    if x.is_cuda:
        from kernels.quantize_rows import triton  # not at the top: a process without a GPU need not load it

        return triton.quantize_rows(x, dtype, group_size, static_scales)
    library, x_dtype = build.library(), build.DTYPES.get(x.dtype)
    has_kernel = dtype == torch.int8 and group_size is None and static_scales is None
    if library is None or x_dtype is None or not x.is_cpu or not has_kernel:
        return reference.quantize_rows(x, dtype, group_size, static_scales)
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype)
    scales = torch.empty(x.shape[0], 1)
    _declared(library).quantize_rows(x.data_ptr(), x_dtype, codes.data_ptr(), scales.data_ptr(), *x.shape)
    return codes, scales
