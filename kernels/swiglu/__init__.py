"""The gated activation of Llama's feed-forward layer.

T tokens, F channels.
"""

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.custom_op import custom_op
from kernels.quantize_rows import quantize_rows
from kernels.swiglu import reference

__all__ = ["swiglu", "swiglu_quantize"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.swiglu.argtypes = (c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int64, c_int64)
    library.swiglu.restype = None
    return library


@custom_op(reference.swiglu)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """What `reference.swiglu` says. Rows may lie apart, as the halves of a fused matrix's outputs do."""
    if gate.is_cuda:
        from kernels.swiglu import triton  # not at the top: a process without a GPU need not load it

        return triton.swiglu(gate, up)
    library, dtype = build.library(), build.DTYPES.get(gate.dtype)
    alike = gate.ndim == 2 and gate.is_cpu and up.shape == gate.shape and up.dtype == gate.dtype
    if library is None or dtype is None or not alike:
        return reference.swiglu(gate, up)
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    num_rows, channels = gate.shape
    out = torch.empty(num_rows, channels, dtype=gate.dtype)
    _declared(library).swiglu(
        *(gate.data_ptr(), up.data_ptr(), out.data_ptr(), dtype),
        *(num_rows, channels, gate.stride(0), up.stride(0)),
    )
    return out


@custom_op(reference.swiglu_quantize)
def swiglu_quantize(gate: Tensor, up: Tensor, dtype: torch.dtype, group_size: int | None) -> tuple[Tensor, Tensor]:
    """To the bit `quantize_rows` of `swiglu`; on a GPU in one launch."""
    if gate.is_cuda:
        from kernels.swiglu import triton

        return triton.swiglu_quantize(gate, up, dtype, group_size)
    return quantize_rows(swiglu(gate, up), dtype, group_size)
