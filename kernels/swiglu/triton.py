"""SwiGLU. One program processes some channels of a token, or all channels that share a scale."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantize_rows.triton import empty_codes, quantize, quantize_rows

SIZE = 1024


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute the same as kernels/swiglu/reference.py. Rows need not be contiguous, for example halves of a fused
    matrix."""
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(gate, up, output, None, SIZE)
    return output


def swiglu_quantize(
    gate: Tensor, up: Tensor, dtype: torch.dtype, group_size: int | None, static_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the same as kernels/swiglu/reference.py, bit-identical to the two kernels in sequence."""
    if static_scales is not None:
        return quantize_rows(swiglu(gate, up), dtype, group_size, static_scales)
    size = min(group_size or gate.shape[1], gate.shape[1])
    codes, scales = empty_codes(gate, dtype, size)
    _launch(gate, up, codes, scales, size)
    return codes, scales


def _launch(gate: Tensor, up: Tensor, output: Tensor, scales: Tensor | None, channels_of_a_program: int) -> None:
    gate, up = (part if part.stride(-1) == 1 else part.contiguous() for part in (gate, up))
    num_tokens, channels = gate.shape
    if output.numel():
        grid = (num_tokens, triton.cdiv(channels, channels_of_a_program))
        size = triton.next_power_of_2(channels_of_a_program)
        warps = min(max(size // 256, 1), 16)
        _swiglu[grid](
            gate,
            up,
            output,
            scales,
            gate.stride(0),
            up.stride(0),
            channels,
            channels_of_a_program,
            SIZE=size,
            num_warps=warps,
        )


@triton.jit
def silu(x):
    """Return x * sigmoid(x) for float32 x."""
    return x / (1 + tl.exp(-x))


@triton.jit
def _swiglu(gate, up, output, scales, gate_stride, up_stride, channels, channels_of_a_program, SIZE: tl.constexpr):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    unit = tl.arange(0, SIZE)
    channel = part * channels_of_a_program + unit
    mask = (channel < channels) & (unit < channels_of_a_program)
    dtype: tl.constexpr = gate.dtype.element_ty
    active = silu(tl.load(gate + token * gate_stride + channel, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    product = active.to(tl.float32) * tl.load(up + token * up_stride + channel, mask=mask, other=0.0).to(tl.float32)
    if scales is not None:
        groups = product.to(dtype).to(tl.float32)[None, :]
        codes, scale = quantize(groups, output.dtype.element_ty)
        tl.store(scales + token * tl.num_programs(1) + part + tl.arange(0, 1), scale)
        product = tl.reshape(codes, [SIZE])
    tl.store(output + token * channels + channel, product.to(output.dtype.element_ty), mask=mask)
