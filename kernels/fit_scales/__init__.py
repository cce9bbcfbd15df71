"""Chooses the scales and zero points of 4-bit weights."""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.fit_scales import reference
from kernels.operator import UnsupportedArguments, operator

__all__ = ["fit_scales"]


@operator(reference.fit_scales)
def fit_scales(
    cpp: Library, weight: Tensor, group_size: int, is_symmetric: bool, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points of weight [O, I], as `reference.fit_scales` does, to the bit."""
    dtype, rounded_dtype = DTYPES.get(weight.dtype), DTYPES.get(scale_dtype)
    if dtype is None or rounded_dtype is None or not weight.is_cpu or not weight.numel():
        raise UnsupportedArguments
    weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    scales = torch.empty(num_outputs, num_inputs // group_size)
    zero_points = torch.empty(num_outputs, 0 if is_symmetric else scales.shape[1], dtype=torch.int8)
    cpp.fit_scales(
        weight.data_ptr(),
        dtype,
        scales.numel(),
        group_size,
        is_symmetric,
        rounded_dtype,
        scales.data_ptr(),
        zero_points.data_ptr(),
    )
    return scales, zero_points
