"""The gated norms of Mamba-2 and of Kimi Delta Attention. One program normalises one group of channels of one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.swiglu.triton import silu


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float, gates_output: bool = False
) -> Tensor:
    """Compute the same as kernels/gated_rms_norm/reference.py."""
    x, gate = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, gate))
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if output.numel():
        size = triton.next_power_of_2(group_size)
        strides, options = (x.stride(0), gate.stride(0)), {"SIZE": size, "num_warps": min(max(size // 512, 1), 16)}
        grid, arguments = (len(x), x.shape[1] // group_size), (x, gate, weight.contiguous(), output)
        _gated_rms_norm[grid](*arguments, *strides, group_size, eps, GATES_OUTPUT=gates_output, **options)
    return output


@triton.jit
def _gated_rms_norm(
    x, gate, weight, output, x_stride, gate_stride, group_size, eps, SIZE: tl.constexpr, GATES_OUTPUT: tl.constexpr
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mask, channel = tl.arange(0, SIZE) < group_size, group * group_size + tl.arange(0, SIZE)
    gates = tl.load(gate + row * gate_stride + channel, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(x + row * x_stride + channel, mask=mask, other=0.0).to(tl.float32)
    if not GATES_OUTPUT:
        z *= silu(gates)
    normalised = z * tl.rsqrt(tl.sum(z * z, 0) / group_size + eps)
    factors = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    if GATES_OUTPUT:
        scaled = factors * normalised / (1.0 + tl.exp(-gates))
    else:
        scaled = factors * normalised.to(x.dtype.element_ty).to(tl.float32)
    start = row * tl.num_programs(1) * group_size
    tl.store(output + start + channel, scaled.to(output.dtype.element_ty), mask=mask)
