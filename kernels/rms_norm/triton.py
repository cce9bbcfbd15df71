"""One program for each row: it is read once, kept in registers, and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As kernels/rms_norm/reference.py says; x of any shape [..., D]."""
    x = x.contiguous()
    output = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    _launch(x, None, weight, output, None, eps)
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As kernels/rms_norm/reference.py says."""
    x, residual = x.contiguous(), residual.contiguous()
    output, total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype)), torch.empty_like(x)
    _launch(x, residual, weight, output, total, eps)
    return output, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, output: Tensor, total: Tensor | None, eps: float
) -> None:
    weight, channels = weight.contiguous(), x.shape[-1]
    if x.numel():
        size = triton.next_power_of_2(channels)
        warps = min(max(size // 512, 1), 16)  # 16 elements of each thread
        _rms_norm[(x.numel() // channels,)](
            x, residual, weight, output, total, eps, channels, SIZE=size, num_warps=warps
        )


@triton.jit
def _rms_norm(x, residual, weight, output, total, eps, channels: tl.constexpr, SIZE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * channels
    channel = tl.arange(0, SIZE)
    mask = channel < channels
    row = tl.load(x + start + channel, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        row += tl.load(residual + start + channel, mask=mask, other=0.0).to(tl.float32)
        row = row.to(total.dtype.element_ty)
        tl.store(total + start + channel, row, mask=mask)
        row = row.to(tl.float32)
    normalised = (row * tl.rsqrt(tl.sum(row * row, 0) / channels + eps)).to(x.dtype.element_ty)
    scaled = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32) * normalised.to(tl.float32)
    tl.store(output + start + channel, scaled.to(output.dtype.element_ty), mask=mask)
