"""Rotary position embedding. One program per token reads the angles once for all heads."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Compute the same as kernels/rope/reference.py, but in float32, rounded once. x may be a slice of a wider tensor."""
    x, cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, cos, sin))
    num_tokens, heads, channels = x.shape
    pairs = cos.shape[-1]
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if output.numel():
        _rope[(num_tokens,)](
            x,
            cos,
            sin,
            output,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            sin.stride(0),
            heads=heads,
            channels=channels,
            pairs=pairs,
            interleaved=interleaved,
            HEADS=triton.next_power_of_2(heads),
            PAIRS=triton.next_power_of_2(pairs),
            REST=0 if channels == 2 * pairs else triton.next_power_of_2(channels - 2 * pairs),
            num_warps=4,
        )
    return output


@triton.jit
def _rope(
    x,
    cos,
    sin,
    output,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    heads: tl.constexpr,
    channels: tl.constexpr,
    pairs: tl.constexpr,
    interleaved: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    inside = pair < pairs
    cos = tl.load(cos + token * cos_stride + pair, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin + token * sin_stride + pair, mask=inside, other=0.0).to(tl.float32)
    place = 2 * pair if interleaved else pair
    step: tl.constexpr = 1 if interleaved else pairs
    source = x + token * token_stride + head * head_stride
    target = output + (token * heads + head) * channels
    mask = inside & (head < heads)
    first = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + place + step, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + place, tl.fma(first, cos, -(second * sin)).to(output.dtype.element_ty), mask=mask)
    tl.store(target + place + step, tl.fma(second, cos, first * sin).to(output.dtype.element_ty), mask=mask)
    if REST > 0:
        place = 2 * pairs + tl.arange(0, REST)[None, :]
        mask = (place < channels) & (head < heads)
        tl.store(target + place, tl.load(source + place, mask=mask, other=0.0), mask=mask)
