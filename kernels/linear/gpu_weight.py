"""The form of a quantised weight that the GPU's kernels read.

N outputs, K inputs, G groups of inputs that share a scale, C inputs of a chunk: what a program reads of a weight at a time.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.int_weight import check_codes, find_group_size

BLOCK = 128  # outputs, and inputs, that share a scale in a float8 weight with blocks (arXiv 2412.19437)
FLOAT_CHUNK_BYTES = 128


@dataclass(frozen=True)
class GPUWeight:
    """A weight [N, K], in the order in which a program reads it: value[o, i] = (code[o, i] - zero[g, o]) * scale[g, o].

    g is i // group_size. Or the weights of several experts (`stack`), whose number is the first axis of every tensor.
    """

    codes: Tensor
    """int8 or float8_e4m3fn [N, K], K rounded up to whole chunks; or uint8 [N, K/2]: in each chunk, byte j has input j in its lower and
    input j + C/2 in its upper four bits (plus 8 if symmetric), so that either half of a byte meets inputs that lie beside each other."""
    scales: Tensor | None
    """float32 [G, N], or [G, ceil(N / 128)] of a float8 weight with blocks; None if codes are floats of 16 or 32 bits [N, K]."""
    zero_points: Tensor | None
    """int8 [G, N], or None if symmetric."""
    num_inputs: int
    chunk: int

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def num_groups(self) -> int:
        return 1 if self.scales is None else self.scales.shape[-2]

    @property
    def has_blocks(self) -> bool:
        return self.scales is not None and self.codes.is_floating_point() and self.scales.shape[-1] != self.num_outputs

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of its memory, by name."""
        parts = {"codes": self.codes, "scales": self.scales, "zero_points": self.zero_points}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def format(self) -> Hashable:
        """Return what weights that one kernel reads have in common."""
        shapes = {name: (part.shape, part.dtype) for name, part in self.tensors.items()}
        return self.num_inputs, self.chunk, frozenset(shapes.items())

    @property
    def output_format(self) -> Hashable:
        """Return what outputs that lie in one weight have in common."""
        dtypes = {name: part.dtype for name, part in self.tensors.items()}
        return self.num_inputs, self.chunk, self.num_groups, self.has_blocks, frozenset(dtypes.items())

    def expert(self, number: int) -> "GPUWeight":
        """Return the weight of one of several experts: a view."""
        scales = None if self.scales is None else self.scales[number]
        zeros = None if self.zero_points is None else self.zero_points[number]
        return GPUWeight(self.codes[number], scales, zeros, self.num_inputs, self.chunk)

    def slice_outputs(self, outputs: slice) -> "GPUWeight":
        """Return the weight of some outputs, of blocks whole ones: a view, whose groups of scales and zero points lie apart."""
        of_scales = slice(outputs.start // BLOCK, -(-outputs.stop // BLOCK)) if self.has_blocks else outputs
        scales = None if self.scales is None else self.scales[:, of_scales]
        zeros = None if self.zero_points is None else self.zero_points[:, outputs]
        return GPUWeight(self.codes[outputs], scales, zeros, self.num_inputs, self.chunk)


def of_floats(values: Tensor) -> GPUWeight:
    """Return values [..., N, K] of 16 or 32 bits as a weight, as they are."""
    return GPUWeight(values, None, None, values.shape[-1], FLOAT_CHUNK_BYTES // values.itemsize)


def stack(weights: Sequence[GPUWeight]) -> GPUWeight:
    """Return weights of one format as those of several experts, in memory of its own."""
    first = weights[0]
    tensors = {name: torch.stack([weight.tensors[name] for weight in weights]) for name in first.tensors}
    return GPUWeight(tensors["codes"], tensors.get("scales"), tensors.get("zero_points"), first.num_inputs, first.chunk)


def join(weights: Sequence[GPUWeight]) -> GPUWeight | None:
    """Return one weight with the outputs of all, one's after the other's, in memory of its own; None where blocks do not end with a weight.

    The weights are of one `output_format`.
    """
    first = weights[0]
    if first.has_blocks and any(weight.num_outputs % BLOCK for weight in weights[:-1]):
        return None
    axes = {"codes": 0, "scales": 1, "zero_points": 1}
    tensors = {name: torch.cat([weight.tensors[name] for weight in weights], axes[name]) for name in first.tensors}
    return GPUWeight(tensors["codes"], tensors.get("scales"), tensors.get("zero_points"), first.num_inputs, first.chunk)


def pack(codes: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> GPUWeight:
    """Pack codes as `int_weight.pack`, on any device, or float8_e4m3fn [N, K] with scales [N, G], or [1, 1] for the whole weight.

    Scales of float8 that 128 outputs from a multiple of 128 on have in common are held once. Raises ValueError as `int_weight.pack` does.
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
