"""Quantised weights: format of the codes, choice of scales, rounding, and dequantisation.

O output channels, I input channels, G groups of input channels that share a scale (1 for a whole row).
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from conf.errors import UserError, check
from kernels.fit_scales import fit_scales
from kernels.kv_format import FLOAT8_MAX
from kernels.linear.block_weight import GLOBAL_BYTES, KINDS, read_blocks
from kernels.linear.float_weight import TILE
from quantization import fp4
from quantization.codes import CodeKind, scale_of, to_fp8, to_int8

# Numbers quantised at once: 1 MB in float32. A block of 4 MB allocates new memory each time and takes 4.8 ns instead of
# 2.3 ns per number for int8, and 13.0 ns instead of 6.5 ns for int4 (one thread of a busy machine). With smaller blocks
# torch's threads synchronise more often.
BLOCK = 2**18
ROWS_AT_ONCE = 4096  # rows of a head whose float32 values are in memory at once


@dataclass(frozen=True)
class WeightFormat:
    """Format of a weight's codes.

    `group_size` is the number of input channels that share a scale; None means a whole row.

    Asymmetric codes are 4-bit: 0 to 15, with a zero point per group. `scale_dtype` is the dtype of the scales in a
    file. Scales are rounded to it before codes are chosen, so that the file holds exactly the chosen weight.

    `of_blocks` returns the format of a ggml block type.
    """

    bits: int = 8
    kind: CodeKind = CodeKind.INT
    symmetric: bool = True
    group_size: int | None = None
    per_tensor: bool = False
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        size = self.group_size
        check(
            self.bits == 8 or self.bits == 4 and self.kind is CodeKind.INT or self.kind.is_blocks,
            "bits",
            self.bits,
            "8, or 4 for int codes",
        )
        check(self.symmetric or self.bits == 4 or self.kind.is_blocks, "symmetric", self.symmetric, "true, or bits=4")
        check(size is None or size > 0, "group_size", size, "a positive number, or null")
        check(size is None or not self.per_tensor, "group_size", size, "null where scales are per tensor")

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Return the bytes of a weight's packed codes, zero points and float32 scales.

        A scale per tensor is counted as one scale per output.
        """
        if self.kind.is_blocks:
            kind = KINDS[self.kind.name]
            tiles = -(-num_outputs // TILE) * (num_inputs // kind.block_size) * kind.packed_bytes
            return tiles + GLOBAL_BYTES * kind.has_global_scale
        groups = 1 if self.group_size is None else -(-num_inputs // self.group_size)
        return num_outputs * (num_inputs * self.bits // 8 + groups * (4 if self.symmetric else 5))

    @property
    def depends_on_all_outputs(self) -> bool:
        """Whether the codes of an output depend on all outputs."""
        return self.per_tensor or self.kind.is_blocks and KINDS[self.kind.name].has_global_scale

    @property
    def code_range(self) -> tuple[float, float]:
        """Return the lowest and the highest code."""
        if self.kind is CodeKind.FP8:
            return -FLOAT8_MAX, FLOAT8_MAX
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if self.symmetric else (0, 2**self.bits - 1)


def of_blocks(name: str) -> WeightFormat:
    """Return the format of a ggml block type, whose name is in KINDS."""
    kind = KINDS[name]
    return WeightFormat(kind.bits, CodeKind[name], symmetric=not kind.has_minimums, group_size=kind.group_size)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as codes.

    codes: [O, I] int8 (4-bit codes unpacked) or float8_e4m3fn.
    scales: [O, G] float32, or [1, 1] per tensor. zero_points: [O, G] int8, or None.
    permutation: [I] int64 or None, the input channel of each column of `codes`. x[:, permutation] has the columns'
    order.
    blocks: the ggml block type of `codes` (a name of KINDS), or None. With blocks, `codes` is uint8 [O, bytes] and
    contains the scales, and `scales` is [O, 0], or the global scale of NVFP4, float64 [1, 1] (as in BlockCodes).
    """

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    permutation: Tensor | None = None
    blocks: str | None = None

    @property
    def global_scale(self) -> float:
        """The number by which the scales of blocks are multiplied."""
        return float(self.scales) if self.scales.numel() else 1.0

    def dequantize(self) -> Tensor:
        """Return (codes - zero_points) * scales, [O, I] float32, with the input channels in their original order."""
        weight = self._dequantize_columns()
        return weight if self.permutation is None else weight[:, self.permutation.argsort()]

    def _dequantize_columns(self) -> Tensor:
        if self.blocks is not None:
            return read_blocks(self.blocks, self.codes, self.global_scale).dequantize()
        codes = self.codes.float().unflatten(1, (self.scales.shape[1], -1))  # [O, G, I / G]
        if self.zero_points is not None:
            codes = codes - self.zero_points.unsqueeze(2)
        weight: Tensor = (codes * self.scales.unsqueeze(2)).flatten(1)
        return weight

    def dequantize_to(self, dtype: torch.dtype) -> Tensor:
        """Return `dequantize` rounded to `dtype`, without all of its float32 values in memory at once."""
        per_tensor = len(self.scales) < len(self.codes)
        parts = (
            replace(
                self,
                codes=self.codes[rows],
                scales=self.scales if per_tensor else self.scales[rows],
                zero_points=None if self.zero_points is None else self.zero_points[rows],
            )
            for rows in (slice(i, i + ROWS_AT_ONCE) for i in range(0, len(self.codes), ROWS_AT_ONCE))
        )
        return torch.cat([part.dequantize().to(dtype) for part in parts])


def choose_scales(weight: Tensor, format: WeightFormat, fits_range: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the scales and zero points of weight [O, I] of any float dtype, shaped as in QuantizedWeight.

    8 bits: absmax / 127 for int8, absmax / 448 for fp8; zero points are None. 4 bits: the scales and zero points of the
    least squared error among the scales that represent each group's extreme by a whole code (kernels/fit_scales). Zero
    points are None if the format is symmetric. With `fits_range`, zero points and scales instead cover the range from
    minimum to maximum, widened to contain 0. Raises UserError for a value that is not finite, and for groups that do
    not divide the input channels.
    """
    num_outputs, num_inputs = weight.shape
    size = format.group_size or num_inputs
    if num_inputs % size:
        raise UserError(
            f"groups of {size} do not divide the {num_inputs} input channels of a weight [{num_outputs}, {num_inputs}]: "
            f"give a group_size that does, or null for one scale per output channel, or skip this layer"
        )
    low, high = (torch.cat(ends) for ends in zip(*map(partial(_ranges, weight, size), _blocks(weight)), strict=True))
    if format.per_tensor:
        low, high = low.amin().reshape(1, 1), high.amax().reshape(1, 1)
    if not (low.isfinite() & high.isfinite()).all():
        raise _not_finite(weight)
    if format.bits == 8:
        return scale_of(torch.maximum(-low, high), format.code_range[1], format.scale_dtype), None
    if fits_range and not format.symmetric:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = scale_of(high - low, format.code_range[1], format.scale_dtype)
        return scales, to_int8(-low / scales, *format.code_range)
    if format.per_tensor:
        scales, zero_points = fit_scales(weight.reshape(1, -1), weight.numel(), format.symmetric, format.scale_dtype)
    else:
        fitted = [fit_scales(weight[rows], size, format.symmetric, format.scale_dtype) for rows in _blocks(weight)]
        scales, zero_points = (torch.cat(parts) for parts in zip(*fitted, strict=True))
    return scales, None if format.symmetric else zero_points


def _not_finite(weight: Tensor) -> UserError:
    count = int((~weight.isfinite()).sum())
    return UserError(
        f"{count} of {weight.numel()} weights are NaN or infinite: give a checkpoint without them, or skip this layer"
    )


def encode(weight: Tensor, scales: Tensor, zero_points: Tensor | None, format: WeightFormat) -> Tensor:
    """Return the codes [O, I] nearest to weight [O, I]. scales, zero_points: [O, G], or [1, 1] per tensor."""
    dtype = torch.float8_e4m3fn if format.kind is CodeKind.FP8 else torch.int8
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = scales.expand(len(weight), -1)
    for rows in _blocks(weight):
        zeros = None if zero_points is None else zero_points[rows]
        codes[rows] = _encode_rows(weight[rows], scales[rows], zeros, format)
    return codes


def _blocks(weight: Tensor) -> list[slice]:
    num_rows = max(1, BLOCK // weight.shape[1])
    return [slice(first, first + num_rows) for first in range(0, len(weight), num_rows)]


def _ranges(weight: Tensor, size: int, rows: slice) -> tuple[Tensor, Tensor]:
    groups = weight[rows].float().unflatten(1, (-1, size))  # [rows, G, I / G]
    return groups.amin(2), groups.amax(2)


def _encode_rows(weight: Tensor, scales: Tensor, zero_points: Tensor | None, format: WeightFormat) -> Tensor:
    ratio = weight.float().unflatten(1, (scales.shape[1], -1)) / scales.unsqueeze(2)  # [O, G, I / G]
    if format.kind is CodeKind.FP8:
        return to_fp8(ratio).flatten(1)
    if zero_points is not None:  # rounded first: a tie must not depend on the parity of the zero point
        ratio = ratio.round() + zero_points.unsqueeze(2)
    return to_int8(ratio, *format.code_range).flatten(1)


def quantize(weight: Tensor, format: WeightFormat, importance: Tensor | None = None) -> QuantizedWeight:
    """Return weight [O, I] as codes: the nearest ones, FP4 blocks, or other blocks as llama.cpp makes them.

    importance: as for `quantize_blocks`; other formats do not use it. Raises UserError as `choose_scales` and `quantize_blocks` do.
    """
    if format.kind.name in fp4.STEPS:
        return quantize_fp4(weight, format.kind.name)
    if format.kind.is_blocks:
        return quantize_blocks(weight, format.kind.name, importance)
    scales, zero_points = choose_scales(weight, format)
    return QuantizedWeight(encode(weight, scales, zero_points, format), scales, zero_points)


def quantize_fp4(weight: Tensor, kind: str) -> QuantizedWeight:
    """Return weight [O, I] in blocks of MXFP4 or NVFP4, which divide the input channels.

    Raises UserError for values that are not finite.
    """
    largest = torch.stack([weight[rows].abs().amax() for rows in _blocks(weight)]).amax()
    if not largest.isfinite():
        raise _not_finite(weight)
    scales, global_scale = torch.empty(len(weight), 0), 1.0
    if KINDS[kind].has_global_scale:
        global_scale = fp4.global_scale_of(largest)
        scales = torch.tensor([[global_scale]], dtype=torch.float64)
    blocks = torch.cat([fp4.quantize_rows(weight[rows], kind, global_scale) for rows in _blocks(weight)])
    return QuantizedWeight(blocks, scales, blocks=kind)


def quantize_blocks(weight: Tensor, kind: str, importance: Tensor | None = None) -> QuantizedWeight:
    """Return weight [O, I] in blocks of the ggml type `kind`, with the bytes of llama-quantize.

    The blocks divide the input channels. importance: mean square of each input channel, [I] float32, or None. Raises
    UserError for values that are not finite or too large for the type.
    """
    from models.formats.gguf.quantize import quantize_tensor  # imported here: other formats do not need gguf

    try:
        blocks = quantize_tensor(weight, kind, importance)
    except OverflowError as error:
        raise UserError(f"a weight holds {error}: give a checkpoint without it, or skip this layer") from error
    return QuantizedWeight(blocks, torch.empty(len(blocks), 0), blocks=kind)
