"""Rotary position embedding of queries and keys.

T tokens, H heads, D channels per head, of which the first R are rotated.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator
from kernels.rope import reference

__all__ = ["rope", "rope_angles"]


@operator(reference.rope, has_triton=True)
def rope(cpp: Library, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return x [T, H, D] rotated, as `reference.rope` does, but in float32 and rounded once. Heads of a token that are
    not contiguous are copied first."""
    dtype = DTYPES.get(x.dtype)
    if dtype is None or not x.is_cpu or not angles_fit(x, cos, sin):
        raise UnsupportedArguments
    num_tokens, num_heads, channels = x.shape
    token_stride, head_stride, channel_stride = x.stride()
    if channel_stride != 1 or head_stride != channels:
        x, token_stride = x.contiguous(), num_heads * channels
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(num_tokens, num_heads, channels, dtype=x.dtype)
    cpp.rope(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        dtype,
        num_tokens,
        num_heads,
        channels,
        cos.shape[1],
        token_stride,
        interleaved,
    )
    return out


def angles_fit(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether cos and sin match x [T, H, D]: both [T, R/2] in x's dtype, with R at most D."""
    alike = cos.shape == sin.shape and cos.dtype == sin.dtype == x.dtype and cos.ndim == 2
    return alike and len(cos) == len(x) and 2 * cos.shape[1] <= x.shape[2]


@operator(reference.rope_angles)
def rope_angles(
    cpp: Library, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, R/2], as `reference.rope_angles` does. The last bit of float32 may differ."""
    number = DTYPES.get(dtype)
    are_known = (positions.dtype, frequencies.dtype) == (torch.int64, torch.float32)
    if number is None or not positions.is_cpu or not are_known or positions.ndim != 1 or frequencies.ndim != 1:
        raise UnsupportedArguments
    positions, frequencies = positions.contiguous(), frequencies.contiguous()
    num_tokens, half = positions.shape[0], frequencies.shape[0]
    cos, sin = (torch.empty(num_tokens, half, dtype=dtype) for _ in range(2))
    cpp.rope_angles(
        positions.data_ptr(),
        frequencies.data_ptr(),
        factor,
        cos.data_ptr(),
        sin.data_ptr(),
        number,
        num_tokens,
        half,
    )
    return cos, sin
