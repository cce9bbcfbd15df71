"""RMS norm. One program per row reads it once, keeps it in registers, and writes it once, unquantised or as codes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantize_rows.triton import empty_codes, quantize, quantize_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None) -> Tensor:
    """Compute the same as kernels/rms_norm/reference.py, for x of any shape [..., D]."""
    x = x.contiguous()
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight_offset is None else x.dtype
    output = torch.empty_like(x, dtype=dtype)
    _launch(x, None, weight, output, None, None, eps, weight_offset)
    return output


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None
) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight_offset is None else x.dtype
    output, total = torch.empty_like(x, dtype=dtype), torch.empty_like(x)
    _launch(x, residual, weight, output, None, total, eps, weight_offset)
    return output, total


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the same as kernels/rms_norm/reference.py.

    The threads share a row in another way than without quantisation, so the last bit of the sum of squares may differ.
    """
    size = _group_of_registers(x, weight, group_size)
    if size is None or static_scales is not None:
        return quantize_rows(rms_norm(x, weight, eps, weight_offset), dtype, group_size, static_scales)
    x = x.contiguous()
    codes, scales = empty_codes(x, dtype, size)
    _launch(x, None, weight, codes, scales, None, eps, weight_offset, size)
    return codes, scales


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as kernels/rms_norm/reference.py, with the sum of squares of `rms_norm_quantize`."""
    size = _group_of_registers(x, weight, group_size)
    if size is None or static_scales is not None:
        normed, total = add_rms_norm(x, residual, weight, eps, weight_offset)
        return *quantize_rows(normed, dtype, group_size, static_scales), total
    x, residual = x.contiguous(), residual.contiguous()
    codes, scales = empty_codes(x, dtype, size)
    total = torch.empty_like(x)
    _launch(x, residual, weight, codes, scales, total, eps, weight_offset, size)
    return codes, scales, total


def _group_of_registers(x: Tensor, weight: Tensor, group_size: int | None) -> int | None:
    """Return the number of channels that share a scale. None if a program, whose registers hold a power of 2, cannot
    split its row into such groups."""
    size = min(group_size or x.shape[1], x.shape[1])
    is_cut = size in (x.shape[1], triton.next_power_of_2(size))
    return size if is_cut and weight.dtype == x.dtype else None


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    output: Tensor,
    scales: Tensor | None,
    total: Tensor | None,
    eps: float,
    weight_offset: float | None,
    group_size: int = 1,
) -> None:
    weight, channels = weight.contiguous(), x.shape[-1]
    if x.numel():
        size, group = triton.next_power_of_2(channels), triton.next_power_of_2(group_size)
        warps = min(max(size // 512, 1), 16)  # 16 elements per thread
        _rms_norm[(x.numel() // channels,)](
            x,
            residual,
            weight,
            output,
            scales,
            total,
            eps,
            weight_offset,
            channels,
            SIZE=size,
            GROUP=group,
            num_warps=warps,
        )


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    output,
    scales,
    total,
    eps,
    weight_offset,
    channels: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = row * channels
    channel = tl.arange(0, SIZE)
    mask = channel < channels
    values = tl.load(x + start + channel, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + start + channel, mask=mask, other=0.0).to(tl.float32)
        values = values.to(total.dtype.element_ty)
        tl.store(total + start + channel, values, mask=mask)
        values = values.to(tl.float32)
    normalised = values * tl.rsqrt(tl.sum(values * values, 0) / channels + eps)
    factors = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    if weight_offset is not None:
        scaled = (weight_offset + factors) * normalised
    else:
        scaled = factors * normalised.to(x.dtype.element_ty).to(tl.float32)
    if scales is not None:
        groups: tl.constexpr = SIZE // GROUP
        rounded = scaled.to(x.dtype.element_ty).to(tl.float32)
        codes, group_scales = quantize(tl.reshape(rounded, [groups, GROUP]), output.dtype.element_ty)
        group, num_groups = tl.arange(0, groups), tl.cdiv(channels, GROUP)
        tl.store(scales + row * num_groups + group, group_scales, mask=group < num_groups)
        scaled = tl.reshape(codes, [SIZE])
    tl.store(output + start + channel, scaled.to(output.dtype.element_ty), mask=mask)
