"""Finds rows that contain only finite numbers."""

import torch
from torch import Tensor

from kernels.all_finite import reference
from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator

__all__ = ["all_finite"]


@operator(reference.all_finite)
def all_finite(cpp: Library, x: Tensor) -> Tensor:
    """Return whether each row of x [R, C] contains neither NaN nor infinity: bool [R]."""
    dtype = DTYPES.get(x.dtype)
    if dtype is None or x.ndim != 2 or not x.is_cpu:
        raise UnsupportedArguments
    x = x.contiguous()
    out = torch.empty(x.shape[0], dtype=torch.bool)
    cpp.all_finite(x.data_ptr(), dtype, *x.shape, out.data_ptr())
    return out
