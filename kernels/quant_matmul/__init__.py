"""Matrix product with a quantised weight: 8 or 4 bits, a scale for each output or for each group of its inputs.

M rows, K inputs, N outputs. A row's result does not depend on the other rows or on the number of threads, to the bit.
"""

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.quant_matmul import portable, reference
from kernels.quant_matmul.packed import PackedWeight, pack

__all__ = ["PackedWeight", "pack", "quant_matmul", "quant_matmul_int8", "quantize_rows"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    weight = (c_int64,) * 3 + (c_int32,) * 2
    library.quant_matmul.argtypes = (c_void_p, c_int32, c_void_p, c_void_p, c_int64, *weight)
    library.quant_matmul_int8.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int32, c_int64, *weight)
    library.quantize_rows.argtypes = (c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_int64)
    for function in (library.quant_matmul, library.quant_matmul_int8, library.quantize_rows):
        function.restype = None
    return library


def quant_matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [M, K] (float32, bfloat16 or float16) times weight transposed: [M, N] in x's dtype.

    With the C++ kernels, 128 inputs of a row (or a group, if that is less) share a scale and have 16 bits: each is off by at most
    2^-16 of the largest of them, and everything else is exact up to float32 sums. A row with NaN or infinity gives NaN or infinity.
    """
    library = build.library()
    _check(x, weight)
    if library is None or not x.is_cpu:
        return portable.quant_matmul(x, weight)
    x = x.contiguous()
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=x.dtype)
    _declared(library).quant_matmul(
        x.data_ptr(), build.DTYPES[x.dtype], weight.blob.data_ptr(), out.data_ptr(), x.shape[0], *_facts(weight)
    )
    return out


def quant_matmul_int8(x_codes: Tensor, x_scales: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> Tensor:
    """(x_codes * x_scales) times weight transposed: [M, N] in `out_dtype`; sums of a group are exact integers.

    x_codes int8 [M, K]; x_scales float32 [M, 1], or [1, 1] for all rows.
    """
    library = build.library()
    _check(x_codes, weight)
    if library is None or not x_codes.is_cpu:
        return portable.quant_matmul_int8(x_codes, x_scales, weight, out_dtype)
    x_codes, x_scales = x_codes.contiguous(), x_scales.contiguous()
    out = torch.empty(x_codes.shape[0], weight.num_outputs, dtype=out_dtype)
    _declared(library).quant_matmul_int8(
        x_codes.data_ptr(),
        x_scales.data_ptr(),
        int(x_scales.shape[0] > 1),
        weight.blob.data_ptr(),
        out.data_ptr(),
        build.DTYPES[out_dtype],
        x_codes.shape[0],
        *_facts(weight),
    )
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] as int8 [M, K] and one float32 scale per row [M, 1]: max |x| / 127, rounded half to even."""
    library = build.library()
    if library is None or not x.is_cpu:
        return reference.quantize_rows(x)
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(x.shape[0], 1)
    _declared(library).quantize_rows(x.data_ptr(), build.DTYPES[x.dtype], codes.data_ptr(), scales.data_ptr(), *x.shape)
    return codes, scales


def _facts(weight: PackedWeight) -> tuple[int, int, int, int, bool]:
    return weight.num_inputs, weight.num_outputs, weight.group_size, weight.bits, weight.has_zero_points


def _check(x: Tensor, weight: PackedWeight) -> None:
    if x.ndim != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"rows {list(x.shape)} cannot be multiplied by a weight of {weight.num_inputs} inputs")
