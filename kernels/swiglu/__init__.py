"""The gated activation of Llama's feed-forward layer.

T tokens, F channels.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator
from kernels.quantize_rows import quantize_rows
from kernels.swiglu import reference

__all__ = ["swiglu", "swiglu_quantize"]


@operator(reference.swiglu, has_triton=True)
def swiglu(cpp: Library, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, as `reference.swiglu` does. Rows need not be contiguous, for example halves of a fused
    matrix's outputs."""
    dtype = DTYPES.get(gate.dtype)
    alike = gate.ndim == 2 and gate.is_cpu and up.is_cpu and up.shape == gate.shape and up.dtype == gate.dtype
    if dtype is None or not alike:
        raise UnsupportedArguments
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    num_rows, channels = gate.shape
    out = torch.empty(num_rows, channels, dtype=gate.dtype)
    cpp.swiglu(
        gate.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        dtype,
        num_rows,
        channels,
        gate.stride(0),
        up.stride(0),
    )
    return out


@operator(reference.swiglu_quantize, has_triton=True)
def swiglu_quantize(
    cpp: Library,
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `swiglu`, bit-identical. On a GPU it is one launch."""
    return quantize_rows(swiglu(gate, up), dtype, group_size, static_scales)
