"""Layer norm. One program per row reads it once, keeps it in registers, and writes it once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantize_rows.triton import quantize_rows


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the same as kernels/layer_norm/reference.py, for x of any shape [..., D]."""
    x = x.contiguous()
    weight, bias = (None if part is None else part.contiguous() for part in (weight, bias))
    output, channels = torch.empty_like(x), x.shape[-1]
    if x.numel():
        size = triton.next_power_of_2(channels)
        warps = min(max(size // 512, 1), 16)  # 16 elements per thread
        _layer_norm[(x.numel() // channels,)](x, weight, bias, output, eps, channels, SIZE=size, num_warps=warps)
    return output


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return quantize_rows(layer_norm(x, weight, bias, eps), dtype, group_size, static_scales)


@triton.jit
def _layer_norm(x, weight, bias, output, eps, channels: tl.constexpr, SIZE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * channels
    channel = tl.arange(0, SIZE)
    mask = channel < channels
    values = tl.load(x + start + channel, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values, 0) / channels, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / channels + eps)
    if weight is not None:
        normed *= tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + start + channel, normed.to(output.dtype.element_ty), mask=mask)
