"""Rotary position embedding, applied to queries and keys.

T tokens, H heads, D channels per head, of which R turn.
"""

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.custom_op import custom_op
from kernels.rope import reference

__all__ = ["rope", "rope_angles"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    numbers = (c_int32, *(c_int64,) * 5, c_int32)
    library.rope.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p, *numbers)
    library.rope_angles.argtypes = (c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int32, c_int64, c_int64)
    for function in (library.rope, library.rope_angles):
        function.restype = None
    return library


@custom_op(reference.rope)
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """What `reference.rope` says, in float32 and rounded once. The heads of a token must lie side by side, or are copied there."""
    if x.is_cuda:
        from kernels.rope import triton  # not at the top: a process without a GPU need not load it

        return triton.rope(x, cos, sin, interleaved)
    library, dtype = build.library(), build.DTYPES.get(x.dtype)
    if library is None or dtype is None or not x.is_cpu or not angles_fit(x, cos, sin):
        return reference.rope(x, cos, sin, interleaved)
    num_tokens, num_heads, channels = x.shape
    token_stride, head_stride, channel_stride = x.stride()
    if channel_stride != 1 or head_stride != channels:
        x, token_stride = x.contiguous(), num_heads * channels
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(num_tokens, num_heads, channels, dtype=x.dtype)
    _declared(library).rope(
        *(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), dtype),
        *(num_tokens, num_heads, channels, cos.shape[1], token_stride, interleaved),
    )
    return out


def angles_fit(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether cos and sin are what x [T, H, D] is turned by: both [T, R/2] in its dtype, R no more than D."""
    alike = cos.shape == sin.shape and cos.dtype == sin.dtype == x.dtype and cos.ndim == 2
    return alike and len(cos) == len(x) and 2 * cos.shape[1] <= x.shape[2]


@custom_op(reference.rope_angles)
def rope_angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `reference.rope_angles` says; cos and sin may differ in the last bit of float32."""
    library, number = build.library(), build.DTYPES.get(dtype)
    are_known = (positions.dtype, frequencies.dtype) == (torch.int64, torch.float32)
    if library is None or number is None or not positions.is_cpu or not are_known or frequencies.ndim > 1:
        return reference.rope_angles(positions, frequencies, factor, dtype)
    positions, frequencies = positions.contiguous(), frequencies.contiguous()
    num_tokens, half = positions.shape[0], frequencies.shape[0]
    cos, sin = (torch.empty(num_tokens, half, dtype=dtype) for _ in range(2))
    _declared(library).rope_angles(
        *(positions.data_ptr(), frequencies.data_ptr(), factor, cos.data_ptr(), sin.data_ptr()),
        *(number, num_tokens, half),
    )
    return cos, sin
