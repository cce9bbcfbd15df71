"""The form of a quantised weight that the GPU's kernels read.

N outputs, K inputs, G groups of inputs that share a scale, C inputs of a chunk: what a program reads of a weight at a time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quant_matmul.packed import check_codes, find_group_size

BLOCK = 128  # outputs, and inputs, that share a scale in a float8 weight with blocks (arXiv 2412.19437)


@dataclass(frozen=True)
class GPUWeight:
    """value[o, i] = (code[o, i] - zero[g, o]) * scale[g, o] with g = i // group_size, in the order in which a program reads it."""

    codes: Tensor
    """int8 or float8_e4m3fn [N, K], K rounded up to whole chunks; or uint8 [N, K/2]: in each chunk, byte j has input j in its lower and
    input j + C/2 in its upper four bits (plus 8 if symmetric), so that either half of a byte meets inputs that lie beside each other."""
    scales: Tensor
    """float32 [G, N], or [G, ceil(N / 128)] of a float8 weight with blocks."""
    zero_points: Tensor | None
    """int8 [G, N], or None if symmetric."""
    num_inputs: int
    chunk: int

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def has_blocks(self) -> bool:
        return self.codes.is_floating_point() and self.scales.shape[1] != self.num_outputs

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of its memory, by name."""
        zeros = {} if self.zero_points is None else {"zero_points": self.zero_points}
        return {"codes": self.codes, "scales": self.scales} | zeros


def pack(codes: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> GPUWeight:
    """As `packed.pack`, on any device; codes may also be float8_e4m3fn [N, K] with scales [N, G], or [1, 1] for the whole weight.

    Scales of float8 that 128 outputs from a multiple of 128 on have in common are held once. Raises ValueError as `packed.pack` does.
    """
    num_outputs, num_inputs = codes.shape
    group_size = find_group_size(num_inputs, scales.shape[1])
    chunk = BLOCK if group_size == num_inputs else group_size
    scales = scales.float()
    if not codes.is_floating_point():
        check_codes(codes, scales, zero_points, bits)
    elif scales.numel() == 1:
        scales = scales.expand(num_outputs, 1)
    elif scales.shape[1] > 1 and scales[::BLOCK].repeat_interleave(BLOCK, 0)[:num_outputs].equal(scales):
        scales = scales[::BLOCK]
    padded = functional.pad(codes.view(torch.int8), (0, -num_inputs % chunk))
    if bits == 4:
        low, high = (padded + (8 if zero_points is None else 0)).unflatten(1, (-1, 2, chunk // 2)).unbind(2)
        padded = (low | high << 4).view(torch.uint8).flatten(1)
    elif codes.is_floating_point():
        padded = padded.view(codes.dtype)
    zeros = None if zero_points is None else zero_points.T.contiguous()
    return GPUWeight(padded.contiguous(), scales.T.contiguous(), zeros, num_inputs, chunk)
