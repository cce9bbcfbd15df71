"""The sigmoid gate. One program processes some channels of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Compute the same as kernels/sigmoid_gate/reference.py."""
    x, gate = x.contiguous(), gate.contiguous()
    output, channels = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[1]
    if output.numel():
        grid = len(x), triton.cdiv(channels, SIZE)
        _sigmoid_gate[grid](x, gate, output, channels, HAS_ONE=gate.shape[1] == 1, SIZE=SIZE)
    return output


@triton.jit
def _sigmoid_gate(x, gate, output, channels, HAS_ONE: tl.constexpr, SIZE: tl.constexpr):
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask, place = channel < channels, row * channels + channel
    if HAS_ONE:
        gates = tl.load(gate + row).to(tl.float32)
    else:
        gates = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    sigmoid = (1 / (1 + tl.exp(-gates))).to(x.dtype.element_ty).to(tl.float32)
    product = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * sigmoid
    tl.store(output + place, product.to(output.dtype.element_ty), mask=mask)
