"""The gated delta rule of recurrent layers (arXiv 2412.06464, 2510.26692).

T tokens of S sequences, H value heads of D channels, G key heads of N channels, P slots.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.gated_delta import reference
from kernels.operator import UnsupportedArguments, operator
from kernels.state_panels import are_supported, state_shape

__all__ = ["gated_delta", "state_shape"]


@operator(
    reference.gated_delta,
    fake=lambda qkv, decay, write_gate, decay_log, decay_bias, states, group, value_channels, *_: qkv.new_empty(
        qkv.shape[0], states.shape[1] * value_channels
    ),
    has_triton=True,
    mutates_args=("states",),
)
def gated_delta(
    cpp: Library,
    qkv: Tensor,
    decay: Tensor,
    write_gate: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    group: int,
    value_channels: int,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """Return [T, H * D], as `reference.gated_delta` does. The bits of a row depend only on its sequence."""
    inputs, of_heads, slots = (qkv, decay, write_gate), (decay_log, decay_bias), (query_starts, reads, writes, ends)
    num_heads, key_channels = states.shape[1], states.shape[3]
    value_size, num_decays = num_heads * value_channels, key_channels if len(decay_bias) > num_heads else 1
    fit = qkv.dtype in DTYPES and all(part.is_cpu and part.dtype == qkv.dtype for part in inputs) and group > 0
    fit = fit and all(part.is_cpu and part.dtype == torch.float32 and part.ndim == 1 for part in of_heads)
    fit = fit and len(decay_log) == num_heads and len(decay_bias) == num_heads * num_decays
    fit = fit and write_gate.shape == (len(qkv), num_heads) and decay.shape == (len(qkv), len(decay_bias))
    fit = fit and are_supported(states, value_channels, *slots)
    if not fit or (num_keys := (qkv.shape[1] - value_size) // (2 * key_channels)) < 1:
        raise UnsupportedArguments
    if qkv.shape[1] != 2 * num_keys * key_channels + value_size:
        raise UnsupportedArguments
    placed = [part.contiguous() for part in (*inputs, *of_heads, states, *slots)]
    out = torch.empty(qkv.shape[0], value_size, dtype=qkv.dtype)
    sizes = reads.shape[0], num_heads, num_keys, key_channels, value_channels, group, num_decays
    cpp.gated_delta(*(part.data_ptr() for part in placed), out.data_ptr(), DTYPES[qkv.dtype], *sizes)
    return out
