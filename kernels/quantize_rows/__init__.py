"""Rows of activations as codes of 8 bits, each row or each group of its inputs with the scale that its largest number wants.

M rows, K inputs.
"""

import torch
from torch import Tensor

from kernels.build import DTYPES, Library
from kernels.operator import Misfit, operator
from kernels.quantize_rows import reference
from kernels.quantize_rows.rows import ActivationFormat, QuantizedActivations, Rows

__all__ = ["QuantizedActivations", "ActivationFormat", "Rows", "quantize_rows"]


@operator(reference.quantize_rows, has_triton=True)
def quantize_rows(
    cpp: Library,
    x: Tensor,
    dtype: torch.dtype = torch.int8,
    group_size: int | None = None,
    static_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of x [M, K], as `reference.quantize_rows` does. A row's bits depend on that row alone."""
    x_dtype = DTYPES.get(x.dtype)
    has_kernel = dtype == torch.int8 and group_size is None and static_scales is None
    if x_dtype is None or not x.is_cpu or not has_kernel:
        raise Misfit
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype)
    scales = torch.empty(x.shape[0], 1)
    cpp.quantize_rows(x.data_ptr(), x_dtype, codes.data_ptr(), scales.data_ptr(), *x.shape)
    return codes, scales
