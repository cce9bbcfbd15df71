"""The inner loop of GPTQ. C input channels of a block, O output channels."""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.operator import UnsupportedArguments, operator
from kernels.round_channels import reference

__all__ = ["round_channels"]


@operator(reference.round_channels, fake=lambda *_: None, mutates_args=("weights", "codes", "errors"))
def round_channels(
    cpp: Library,
    weights: Tensor,
    factor: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    kept: Tensor | None,
    codes: Tensor,
    errors: Tensor,
    lowest: float,
    highest: float,
) -> None:
    """Round input channels one after the other, as `reference.round_channels` does, with the same bits.

    The bits do not depend on the number of threads or on the instruction set.
    """
    written = (weights, codes, errors)
    if not weights.is_cpu or not all(x.is_contiguous() for x in written):
        raise UnsupportedArguments
    factor = factor.T.contiguous()
    scales = scales.contiguous()
    zero_points, kept = (None if x is None else x.contiguous() for x in (zero_points, kept))
    places = [None if x is None else x.data_ptr() for x in (weights, factor, scales, zero_points, kept, codes, errors)]
    cpp.round_channels(*places, codes.dtype != torch.int8, lowest, highest, *weights.shape, len(codes))
