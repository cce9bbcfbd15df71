"""The layout of a quantised weight for the GPU kernels.

N outputs, K inputs, G groups of inputs that share a scale, C inputs per chunk: the part of a weight that a program
reads at a time.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.block_weight import FP4_VALUES, KINDS, UNIT
from kernels.linear.int_weight import check_codes, find_group_size

BLOCK = 128  # outputs and inputs that share a scale in a block-quantised float8 weight (arXiv 2412.19437)
FLOAT_CHUNK_BYTES = 128
OUTPUT_AXES = {"codes": 0, "scales": 1, "zero_points": 1, "group_scales": 1}
"""The tensors of a weight, with their axes of outputs."""


@dataclass(frozen=True)
class GPUWeight:
    """A weight [N, K] in the order in which a program reads it: value[o, i] = (code[o, i] - zero[g, o]) * scale[g, o]
    with g = i // group_size, or FP4_VALUES[code[o, i]] * scale[g, o] if it is MXFP4 (`scales` are e8m0), or
    FP4_VALUES[code[o, i]] * group_scale[g, o] * scale[0, o] if it is NVFP4 (there are `group_scales`).

    With `stack` it holds the weights of several experts: the first axis of every tensor is the expert.
    """

    codes: Tensor
    """int8 or float8_e4m3fn [N, K], K rounded up to whole chunks; or uint8 [N, K/2]: byte j of a chunk holds input j in
    the lower and input j + C/2 in the upper four bits (plus 8 if symmetric). So the lower halves of the bytes belong to
    contiguous inputs, and so do the upper halves."""
    scales: Tensor | None
    """float32 [G, N], or [G, ceil(N / 128)] for a block-quantised float8 weight; None if codes are floats of 16 or 32
    bits [N, K]. e8m0 scales are uint8 [G, N]. NVFP4 has one of each output: G is 1."""
    zero_points: Tensor | None
    """int8 [G, N]; None if symmetric."""
    num_inputs: int
    chunk: int
    group_scales: Tensor | None = None
    """e4m3 scales without a sign, uint8 [K / 16, N]: a half of a chunk is a group. None if it is not NVFP4."""

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def num_groups(self) -> int:
        return 1 if self.scales is None else self.scales.shape[-2]

    @property
    def group_size(self) -> int | None:
        """Return the inputs that share a scale. None: all inputs."""
        if self.group_scales is not None:
            return self.chunk // 2
        return self.chunk if self.num_groups > 1 else None

    @property
    def is_mxfp4(self) -> bool:
        return self.scales is not None and self.scales.dtype == torch.uint8

    @property
    def has_blocks(self) -> bool:
        return self.scales is not None and self.codes.is_floating_point() and self.scales.shape[-1] != self.num_outputs

    @property
    def tensors(self) -> dict[str, Tensor]:
        parts = {name: getattr(self, name) for name in OUTPUT_AXES}
        return {name: part for name, part in parts.items() if part is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "GPUWeight":
        """Return a weight of this format with other `tensors`."""
        scales, zeros, group_scales = (tensors.get(name) for name in ("scales", "zero_points", "group_scales"))
        return GPUWeight(tensors["codes"], scales, zeros, self.num_inputs, self.chunk, group_scales)

    @property
    def format(self) -> Hashable:
        """Return a key. A kernel can read weights with equal keys."""
        shapes = {name: (part.shape, part.dtype) for name, part in self.tensors.items()}
        return self.num_inputs, self.chunk, frozenset(shapes.items())

    @property
    def output_format(self) -> Hashable:
        """Return a key. Weights with equal keys can be joined along their outputs."""
        dtypes = {name: part.dtype for name, part in self.tensors.items()}
        return self.num_inputs, self.chunk, self.num_groups, self.has_blocks, frozenset(dtypes.items())

    def expert(self, number: int) -> "GPUWeight":
        """Return the weight of one expert, a view."""
        return self.with_tensors({name: part[number] for name, part in self.tensors.items()})

    def slice_outputs(self, outputs: slice) -> "GPUWeight":
        """Return the weight of the given outputs (whole blocks, if it has blocks). It is a view; its scales and zero
        points are not contiguous."""
        blocks = slice(outputs.start // BLOCK, -(-outputs.stop // BLOCK)) if self.has_blocks else outputs
        parts = {}
        for name, part in self.tensors.items():
            chosen = blocks if name == "scales" else outputs
            parts[name] = part[chosen] if OUTPUT_AXES[name] == 0 else part[:, chosen]
        return self.with_tensors(parts)


def of_floats(values: Tensor) -> GPUWeight:
    """Return a weight of unquantised values [..., N, K] of 16 or 32 bits."""
    return GPUWeight(values, None, None, values.shape[-1], FLOAT_CHUNK_BYTES // values.itemsize)


def stack(weights: Sequence[GPUWeight]) -> GPUWeight:
    """Copy weights of one `format` into a weight of several experts."""
    first = weights[0]
    return first.with_tensors({name: torch.stack([each.tensors[name] for each in weights]) for name in first.tensors})


def join(weights: Sequence[GPUWeight]) -> GPUWeight | None:
    """Concatenate the outputs of weights of one `output_format` into a new weight. Returns None if a weight before the
    last one ends within a block."""
    first = weights[0]
    if first.has_blocks and any(weight.num_outputs % BLOCK for weight in weights[:-1]):
        return None
    return first.with_tensors(
        {name: torch.cat([each.tensors[name] for each in weights], OUTPUT_AXES[name]) for name in first.tensors}
    )


def pack(codes: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> GPUWeight:
    """Pack codes as `int_weight.pack` does, on any device, or float8_e4m3fn [N, K] with scales [N, G], or [1, 1] for
    the whole weight.

    If each block of 128 outputs shares its float8 scales, they are stored once per block. Raises ValueError as
    `int_weight.pack` does.
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


def pack_fp4(kind: str, blocks: Tensor, global_scale: float = 1.0) -> GPUWeight:
    """Return the weight of MXFP4 or NVFP4 blocks uint8 [N, bytes] on any device. global_scale: as in BlockCodes."""
    format = KINDS[kind]
    split = blocks.unflatten(1, (-1, format.block_bytes))
    scales, codes = split.split((format.num_factors, format.block_bytes - format.num_factors), 2)
    scales, num_inputs = scales.flatten(1).T.contiguous(), format.block_size * split.shape[1]
    if not format.has_global_scale:  # its codes are in a program's order
        return GPUWeight(codes.flatten(1), scales, None, num_inputs, UNIT)
    first, second = codes.unflatten(2, (-1, 2, format.group_size // 2)).unbind(3)  # [N, B, chunks, 8] each
    codes = torch.cat((first & 15 | second << 4, first >> 4 | second & 0xF0), 3)
    of_outputs = torch.full((1, len(blocks)), global_scale, device=blocks.device)
    return GPUWeight(codes.flatten(1), of_outputs, None, num_inputs, UNIT, scales)


def take_rows(weight: GPUWeight, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `numbers` int64 [M] of the weight of one layer: [M, K] in `dtype`, each value rounded once."""
    if weight.scales is None:
        return weight.codes[numbers]
    codes = weight.codes.view(torch.uint8)[numbers].view(weight.codes.dtype)
    if codes.dtype == torch.uint8:
        halves = codes.unflatten(1, (-1, weight.chunk // 2))  # [M, chunks, C / 2]
        codes = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
    group = torch.arange(weight.num_inputs, device=numbers.device) // (weight.group_size or weight.num_inputs)  # [K]
    scales = weight.scales[:, numbers // BLOCK if weight.has_blocks else numbers].T  # [M, G]
    if weight.is_mxfp4:
        scales = scales.view(torch.float8_e8m0fnu).float()
    if weight.group_scales is not None:
        scales = weight.group_scales[:, numbers].T.view(torch.float8_e4m3fn).float() * scales
    if weight.is_mxfp4 or weight.group_scales is not None:
        return (FP4_VALUES.to(codes.device)[codes.int()] * scales[:, group]).to(dtype)
    values = codes[:, : weight.num_inputs].float()
    if weight.zero_points is not None:
        values -= weight.zero_points[:, numbers].T[:, group]
    elif codes.dtype == torch.uint8:
        values -= 8
    return (values * scales[:, group]).to(dtype)
