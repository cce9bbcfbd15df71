"""Quantises rows. One program processes a row, or a group of its inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.int8, group_size: int | None = None, static_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    rows, inputs = x.shape
    static_scales = None if static_scales is None else static_scales.reshape(-1).expand(rows).contiguous()
    size = min(group_size or inputs, inputs)
    codes, scales = empty_codes(x, dtype, size)
    padded = triton.next_power_of_2(size)
    if rows:
        warps = min(max(padded // 512, 1), 16)
        _quantize_rows[scales.shape](x, static_scales, codes, scales, inputs, size, SIZE=padded, num_warps=warps)
    return codes, scales


def empty_codes(x: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """Return empty codes [M, K] and scales [M, G] for rows x [M, K]."""
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    return codes, torch.empty(x.shape[0], triton.cdiv(x.shape[1], group_size), device=x.device)


@triton.jit
def quantize(groups, dtype: tl.constexpr):
    """Return float32 codes, and scales [G], of float32 groups [G, size], padded with zeros."""
    largest: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    scales = tl.div_rn(tl.max(tl.abs(groups), 1), largest)
    return quantize_with(tl.where(scales == 0, 1.0, scales), groups, dtype)


@triton.jit
def quantize_with(scales, groups, dtype: tl.constexpr):
    """Return float32 codes for the given scales [G]. Codes saturate."""
    scales += tl.sum(groups * 0.0, 1)  # NaN if a number is not finite: `max` would hide it
    codes = tl.where((scales == scales)[:, None], tl.div_rn(groups, scales[:, None]), 0.0)
    if dtype == tl.int8:
        codes = tl.minimum(tl.maximum(codes, -128.0), 127.0)
        # rounds half to even: at the magnitude of 1.5 * 2^23 float32 has no fraction bits
        codes = (codes + 12582912.0) - 12582912.0
    else:
        codes = tl.minimum(tl.maximum(codes, -448.0), 448.0)
    return codes, scales


@triton.jit
def _quantize_rows(x, static_scales, codes, scales, inputs, group_size, SIZE: tl.constexpr):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    unit = tl.arange(0, SIZE)[None, :]
    k = group * group_size + unit
    mask = (k < inputs) & (unit < group_size)
    part = tl.load(x + row * inputs + k, mask=mask, other=0.0).to(tl.float32)  # [1, SIZE]
    if static_scales is None:
        code, scale = quantize(part, codes.dtype.element_ty)
    else:
        chosen = tl.load(static_scales + row + tl.zeros([1], tl.int32))
        code, scale = quantize_with(chosen, part, codes.dtype.element_ty)
    tl.store(scales + row * tl.num_programs(1) + group + tl.arange(0, 1), scale)
    tl.store(codes + row * inputs + k, code.to(codes.dtype.element_ty), mask=mask)
