"""Selects channels of rows in a given order.

R rows, C channels, I channels of the result.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.operator import UnsupportedArguments, operator
from kernels.take_channels import reference

__all__ = ["take_channels"]


@operator(reference.take_channels)
def take_channels(cpp: Library, x: Tensor, order: Tensor) -> Tensor:
    """Return [R, I], as `reference.take_channels` does. C++ does not check that `order` is in the range of x's
    channels: the caller must."""
    if not (x.is_cpu and order.is_cpu) or x.element_size() not in (2, 4) or x.stride(1) != 1:
        raise UnsupportedArguments
    order = order.contiguous()
    out = torch.empty(x.shape[0], order.shape[0], dtype=x.dtype)
    cpp.take_channels(x.data_ptr(), x.stride(0), order.data_ptr(), out.data_ptr(), x.element_size(), *out.shape)
    return out
