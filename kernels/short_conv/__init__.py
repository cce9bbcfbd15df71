"""The causal convolution of recurrent layers over the last few tokens of each sequence.

T tokens of S sequences, C channels, K taps, P slots.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator
from kernels.short_conv import reference

__all__ = ["short_conv"]


@operator(
    reference.short_conv,
    fake=lambda projected, weight, *_: projected.new_empty(projected.shape[0], weight.shape[1]),
    has_triton=True,
    mutates_args=("states",),
)
def short_conv(
    cpp: Library,
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
) -> Tensor:
    """Return [T, C], as `reference.short_conv` does. The bits of a row depend only on its sequence."""
    floats = [projected, weight, states, *([] if bias is None else [bias])]
    integers = [query_starts, reads, writes, ends]
    num_taps, channels = weight.shape
    fit = projected.dtype in DTYPES and all(part.is_cpu and part.dtype == projected.dtype for part in floats)
    fit = fit and all(part.is_cpu and part.dtype == torch.int64 for part in integers) and states.is_contiguous()
    is_gated = projected.shape[1] == 3 * channels
    fit = fit and (is_gated or projected.shape[1] == channels)
    fit = fit and (bias is None or bias.shape == (channels,))
    if not fit or states.shape[1:] != (num_taps - 1, channels):
        raise UnsupportedArguments
    projected, weight, bias = projected.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    query_starts, reads, writes, ends = (part.contiguous() for part in integers)
    out = torch.empty(projected.shape[0], channels, dtype=projected.dtype)
    cpp.short_conv(
        projected.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        states.data_ptr(),
        query_starts.data_ptr(),
        reads.data_ptr(),
        writes.data_ptr(),
        ends.data_ptr(),
        out.data_ptr(),
        DTYPES[projected.dtype],
        is_gated,
        reads.shape[0],
        num_taps,
        channels,
    )
    return out
