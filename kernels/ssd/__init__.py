"""The state space layer of Mamba-2, computed by its recurrence (arXiv 2405.21060).

T tokens of S sequences, H heads of D channels, G groups of N state channels, P slots.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator
from kernels.ssd import reference
from kernels.state_panels import are_supported, state_shape

__all__ = ["ssd", "state_shape"]


@operator(
    reference.ssd,
    fake=lambda xbc, dt, dt_bias, decay_log, skip, states, group, head_channels, *_: xbc.new_empty(
        xbc.shape[0], states.shape[1] * head_channels
    ),
    has_triton=True,
    mutates_args=("states",),
)
def ssd(
    cpp: Library,
    xbc: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    decay_log: Tensor,
    skip: Tensor,
    states: Tensor,
    group: int,
    head_channels: int,
    min_step: float,
    max_step: float,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """Return [T, H * D], as `reference.ssd` does. The bits of a row depend only on its sequence."""
    slots, of_heads = (query_starts, reads, writes, ends), (dt_bias, decay_log, skip)
    num_heads, num_states = states.shape[1], states.shape[3]
    fit = xbc.is_cpu and dt.is_cpu and xbc.dtype in DTYPES and dt.dtype == xbc.dtype and group > 0
    fit = fit and dt.shape == (xbc.shape[0], num_heads) and are_supported(states, head_channels, *slots)
    fit = fit and all(part.is_cpu and part.dtype == torch.float32 and part.shape == (num_heads,) for part in of_heads)
    num_groups = (xbc.shape[1] - num_heads * head_channels) // (2 * num_states) if fit else 0
    fit = fit and num_heads <= num_groups * group
    if not fit or xbc.shape[1] != num_heads * head_channels + 2 * num_groups * num_states:
        raise UnsupportedArguments
    placed = [part.contiguous() for part in (xbc, dt, *of_heads, states, *slots)]
    out = torch.empty(xbc.shape[0], num_heads * head_channels, dtype=xbc.dtype)
    sizes = reads.shape[0], num_heads, num_groups, num_states, head_channels, group, min_step, max_step
    cpp.ssd(*(part.data_ptr() for part in placed), out.data_ptr(), DTYPES[xbc.dtype], *sizes)
    return out
