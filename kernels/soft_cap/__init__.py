"""Soft capping of logits (arXiv 2408.00118).

R rows, C numbers per row.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator
from kernels.soft_cap import reference

__all__ = ["soft_cap"]


@operator(reference.soft_cap)
def soft_cap(cpp: Library, x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), as `reference.soft_cap` does. The bits of an element do not depend on its index."""
    dtype = DTYPES.get(x.dtype)
    if dtype is None or not x.is_cpu:
        raise UnsupportedArguments
    x = x.contiguous()
    out = torch.empty(*x.shape, dtype=x.dtype)
    cpp.soft_cap(x.data_ptr(), cap, out.data_ptr(), dtype, x.numel())
    return out
