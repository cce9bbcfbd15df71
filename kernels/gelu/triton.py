"""GELU. One program processes some channels of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024


def gelu(x: Tensor) -> Tensor:
    return _launch(x, None, is_tanh=False)


def gelu_tanh(x: Tensor, up: Tensor | None = None) -> Tensor:
    """Compute the same as kernels/gelu/reference.py. Rows need not be contiguous, for example halves of a fused matrix."""
    return _launch(x, up, is_tanh=True)


def _launch(x: Tensor, up: Tensor | None, is_tanh: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    up = up if up is None or up.stride(-1) == 1 else up.contiguous()
    num_tokens, channels = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if output.numel():
        up_stride = 0 if up is None else up.stride(0)
        grid = (num_tokens, triton.cdiv(channels, SIZE))
        _gelu[grid](x, up, output, x.stride(0), up_stride, channels, IS_TANH=is_tanh, SIZE=SIZE, num_warps=4)
    return output


@triton.jit
def _gelu(x, up, output, x_stride, up_stride, channels, IS_TANH: tl.constexpr, SIZE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask = channel < channels
    dtype: tl.constexpr = output.dtype.element_ty
    value = tl.load(x + token * x_stride + channel, mask=mask, other=0.0).to(tl.float32)
    if IS_TANH:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        share = 1 - 2 / (tl.exp(2 * inner) + 1)  # tanh
    else:
        share = tl.erf(value * 0.7071067811865476)
    active = (0.5 * value * (1 + share)).to(dtype)
    if up is not None:
        factor = tl.load(up + token * up_stride + channel, mask=mask, other=0.0).to(tl.float32)
        active = (active.to(tl.float32) * factor).to(dtype)
    tl.store(output + token * channels + channel, active, mask=mask)
