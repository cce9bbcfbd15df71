"""Quantises rows of activations to 8-bit codes. Each row, or each group of its inputs, has its own scale.

M rows, K inputs.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator
from kernels.quantize_rows import reference
from kernels.quantize_rows.rows import ActivationFormat, Activations, QuantizedActivations

LANES = 16  # as in simd.h; groups of a row begin at multiples of it
CodesArguments: TypeAlias = tuple[int | None, int | None, bool, int, int | None, int]

__all__ = [
    "ActivationFormat",
    "CodesArguments",
    "QuantizedActivations",
    "Activations",
    "code_arguments",
    "quantize_rows",
]


def _empty_codes(
    x: Tensor, dtype: torch.dtype = torch.int8, group_size: int | None = None, static_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, num_inputs = x.shape
    size = min(group_size or num_inputs, num_inputs)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(num_rows, -(-num_inputs // size), dtype=torch.float32)


@operator(reference.quantize_rows, fake=_empty_codes, has_triton=True)
def quantize_rows(
    cpp: Library,
    x: Tensor,
    dtype: torch.dtype = torch.int8,
    group_size: int | None = None,
    static_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of x [M, K], as `reference.quantize_rows` does. The bits of a row depend only on that
    row."""
    x_dtype = DTYPES.get(x.dtype)
    if x_dtype is None or not x.is_cpu:
        raise UnsupportedArguments
    x = x.contiguous()
    codes, scales, arguments = code_arguments(x, dtype, group_size, static_scales)
    cpp.quantize_rows(x.data_ptr(), x_dtype, *arguments, *x.shape)
    return codes, scales


def code_arguments(
    x: Tensor, dtype: torch.dtype, group_size: int | None, static_scales: Tensor | None
) -> tuple[Tensor, Tensor, CodesArguments]:
    """Return empty codes [M, K], empty scales [M, G], and the C++ arguments that describe them.

    Raises UnsupportedArguments if C++ does not support the format.
    """
    num_rows, num_inputs = x.shape
    size = max(1, min(group_size or num_inputs, num_inputs))
    is_odd = size < num_inputs and size % LANES != 0
    is_static = static_scales is not None
    if is_odd or dtype not in (torch.int8, torch.float8_e4m3fn) or (is_static and not _fits(static_scales, num_rows)):
        raise UnsupportedArguments
    codes, scales = torch.empty(x.shape, dtype=dtype), torch.empty(num_rows, -(-num_inputs // size))
    chosen = (None, 0) if static_scales is None else (static_scales.data_ptr(), int(static_scales.numel() > 1))
    return codes, scales, (codes.data_ptr(), scales.data_ptr(), dtype == torch.float8_e4m3fn, size, *chosen)


def _fits(scales: Tensor | None, num_rows: int) -> bool:
    return (
        scales is not None
        and scales.is_cpu
        and scales.dtype == torch.float32
        and scales.numel() in (1, num_rows)
        and scales.is_contiguous()
    )
