"""Weights in ggml's block formats (llama.cpp): as stored in files, as codes and scales, and packed for the CPU kernels.

N outputs, K inputs, G groups of inputs, B blocks of inputs. Types and bit order follow ggml-quants.c.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels import build
from kernels.linear.float_weight import TILE
from kernels.linear.int_weight import CODES, PackedFormat

UNIT = 32  # inputs whose codes are stored together
SCALE_OFFSET = 32  # added to scales of six bits
GLOBAL_BYTES = 8  # of a global scale, float64
PACKED_AT_ONCE = 2**22  # codes; limits intermediate results to a small fraction of a weight


class BlockKind(NamedTuple):
    """A ggml type. With minimums a value is scale * code - minimum, else scale * (code - 2^(bits - 1)).

    With `values` it is scale * values[code]. Blocks of 32 store the negative minimum, which ggml adds. A block has one
    float16 factor for each kind of scale; factors of eight bits are the scales of groups.
    """

    bits: int
    group_size: int
    block_size: int
    block_bytes: int  # in a file
    # byte offsets in a block of the factors: of the scales, and of the minimums if there are any
    factors_at: tuple[int, ...]
    scale_bits: int = 8  # of a group's scale, in a packed weight
    values: Tensor | None = None  # float32 [16]
    factor_dtype: torch.dtype = torch.float16

    @property
    def has_minimums(self) -> bool:
        return len(self.factors_at) == 2

    @property
    def has_scales(self) -> bool:
        """Whether the scale of a group is the block's factor times an integer. Otherwise it is the factor itself."""
        return self.block_size > self.group_size and self.factor_dtype == torch.float16

    @property
    def num_factors(self) -> int:
        """Factors of a block for each kind of scale."""
        return 1 if self.factor_dtype == torch.float16 else self.block_size // self.group_size

    @property
    def has_global_scale(self) -> bool:
        """Whether the scales of all groups are multiplied by a number of the whole weight."""
        return self.factor_dtype == torch.float8_e4m3fn

    @property
    def packed_bytes(self) -> int:
        """Bytes of one block of 16 outputs in a packed weight."""
        return sum(self.part_bytes)

    @property
    def part_bytes(self) -> tuple[int, int, int]:
        """Bytes of the factors, scales and codes of one block of 16 outputs in a packed weight."""
        parts = TILE * (1 + self.has_minimums)
        scales = self.block_size // self.group_size * self.scale_bits // 8 if self.has_scales else 0
        return (
            parts * self.num_factors * self.factor_dtype.itemsize,
            parts * scales,
            TILE * self.block_size * self.bits // 8,
        )


IQ4_VALUES = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
"""The values of IQ4_NL and IQ4_XS, `kvalues_iq4nl` in ggml-common.h."""
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of e2m1. ggml stores their doubles and halves the scales."""
KINDS = {
    "Q4_0": BlockKind(4, 32, 32, 18, (0,)),
    "Q8_0": BlockKind(8, 32, 32, 34, (0,)),
    "IQ4_NL": BlockKind(4, 32, 32, 18, (0,), values=IQ4_VALUES),
    "IQ4_XS": BlockKind(4, 32, 256, 136, (0,), values=IQ4_VALUES),
    "MXFP4": BlockKind(4, 32, 32, 17, (0,), values=FP4_VALUES, factor_dtype=torch.float8_e8m0fnu),
    "NVFP4": BlockKind(4, 16, 64, 36, (0,), values=FP4_VALUES, factor_dtype=torch.float8_e4m3fn),
    "Q4_1": BlockKind(4, 32, 32, 20, (0, 2)),
    "Q5_0": BlockKind(5, 32, 32, 22, (0,)),
    "Q5_1": BlockKind(5, 32, 32, 24, (0, 2)),
    "Q3_K": BlockKind(3, 16, 256, 110, (108,), scale_bits=6),
    "Q4_K": BlockKind(4, 32, 256, 144, (0, 2)),
    "Q5_K": BlockKind(5, 32, 256, 176, (0, 2)),
    "Q6_K": BlockKind(6, 16, 256, 210, (208,)),
}


@dataclass(frozen=True)
class BlockCodes:
    """The codes and scales of a weight in blocks. `kind` is a key of KINDS."""

    kind: str
    codes: Tensor
    """uint8 [N, K]."""
    factors: Tensor
    """float32 [1 or 2, N, B or G], values of the kind's dtype: factors of the scales, and of the minimums if there are any."""
    scales: Tensor
    """int8 [1 or 2, N, G], multiplied by the factors. [1 or 2, N, 0] if the factors are the scales."""
    global_scale: float = 1.0
    """A float64, multiplied by the scales; each product is rounded to float32. For files that divide by a float32 it
    is the reciprocal: its products, rounded, are the quotients, rounded, because a quotient of a float8 by a float32
    is farther from the middle of two float32 numbers than the errors of float64."""

    def dequantize(self) -> Tensor:
        """Return the weight float32 [N, K]. The product is rounded once, and the subtraction of a minimum once."""
        kind = KINDS[self.kind]
        of_groups = self.factors.repeat_interleave(kind.block_size // kind.group_size // kind.num_factors, 2)
        if kind.has_global_scale:
            of_groups = (of_groups.double() * self.global_scale).float()
        scales = (of_groups * self.scales if kind.has_scales else of_groups).unsqueeze(3)  # [1 or 2, N, G, 1]
        numbers = self.codes.float() if kind.values is None else kind.values[self.codes.int()]
        numbers = numbers.unflatten(1, (-1, kind.group_size))  # [N, G, K / G]
        values: Tensor
        if kind.has_minimums:
            values = scales[0] * numbers - scales[1]
        else:
            values = scales[0] * (numbers - 2 ** (kind.bits - 1) if kind.values is None else numbers)
        return values.flatten(1)

    def rows(self, first: int, last: int) -> "BlockCodes":
        factors, scales = self.factors[:, first:last], self.scales[:, first:last]
        return replace(self, codes=self.codes[first:last], factors=factors, scales=scales)


def read_blocks(kind: str, blocks: Tensor, global_scale: float = 1.0) -> BlockCodes:
    """Read the codes and scales of a file's blocks, uint8 [N, B * block_bytes]. global_scale: as in BlockCodes."""
    split, factors = blocks.unflatten(1, (-1, KINDS[kind].block_bytes)), read_factors(kind, blocks)  # [N, B, bytes]
    if kind == "Q8_0":
        no_scales = torch.empty(1, len(blocks), 0, dtype=torch.int8)
        return BlockCodes(kind, (split[:, :, 2:] ^ 128).flatten(1), factors, no_scales)
    if kind == "IQ4_XS":
        _, high, low, packed = split.split((2, 2, 4, 128), 2)
        codes = packed.unflatten(2, (8, 1, 16)) >> _shifts(0, 4) & 15  # [N, B, 8, 2, 16]
        scales = low.unsqueeze(3) >> torch.tensor([0, 4], dtype=torch.uint8) & 15  # [N, B, 4, 2]
        upper = high.unsqueeze(3) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3  # [N, B, 2, 4]
        centred = (scales.flatten(2) | upper.flatten(2) << 4).view(torch.int8) - SCALE_OFFSET
        return BlockCodes(kind, codes.flatten(1), factors, centred.flatten(1)[None])
    if kind == "NVFP4":
        codes = split[:, :, 4:].unflatten(2, (4, 1, 8)) >> _shifts(0, 4) & 15  # [N, B, 4, 2, 8]
        return BlockCodes(
            kind, codes.flatten(1), factors, torch.empty(1, len(blocks), 0, dtype=torch.int8), global_scale
        )
    if not KINDS[kind].has_scales:
        low = split[:, :, -16:]
        codes = torch.cat((low & 15, low >> 4), 2)  # [N, B, 32]
        if KINDS[kind].bits == 5:
            bits = (split[:, :, -20:-16].unsqueeze(3) >> torch.arange(8, dtype=torch.uint8)).flatten(2) & 1
            codes = codes | bits << 4
        no_scales = torch.empty(len(factors), len(blocks), 0, dtype=torch.int8)
        return BlockCodes(kind, codes.flatten(1), factors, no_scales)
    if kind == "Q3_K":
        high, low, packed, _ = split.split((32, 64, 12, 2), 2)
        low = low.unflatten(2, (2, 1, 32)) >> _shifts(0, 2, 4, 6)  # [N, B, 2, 4, 32]
        high = high.unsqueeze(2) >> _shifts(*range(8))  # [N, B, 8, 32]
        codes = (low & 3).flatten(2) | (high & 1).flatten(2) << 2
        return BlockCodes(kind, codes.flatten(1), factors, _centred_six_bits(packed))
    if kind == "Q6_K":
        low, high, scales, _ = split.split((128, 64, 16, 2), 2)
        # [N, B, 2, 2, 64]: 64 codes of the lower bits, then 64 of the upper bits
        low = low.unflatten(2, (2, 1, 64)) >> _shifts(0, 4)
        high = high.unflatten(2, (2, 1, 32)) >> _shifts(0, 2, 4, 6)  # [N, B, 2, 4, 32]
        codes = (low & 15).flatten(2) | (high & 3).flatten(2) << 4
        return BlockCodes(kind, codes.flatten(1), factors, scales.view(torch.int8).flatten(1)[None])
    _, packed, *bits = split.split((4, 12, 32, 128) if kind == "Q5_K" else (4, 12, 128), 2)
    codes = (bits[-1].unflatten(2, (4, 1, 32)) >> _shifts(0, 4)) & 15  # [N, B, 4, 2, 32]
    codes = codes.flatten(2)
    if kind == "Q5_K":
        codes = codes | ((bits[0].unsqueeze(2) >> _shifts(*range(8))) & 1).flatten(2) << 4
    return BlockCodes(kind, codes.flatten(1), factors, _six_bits(packed))


def read_factors(kind: str, blocks: Tensor) -> Tensor:
    """Return the factors float32 [1 or 2, N, B or G] of a file's blocks uint8 [N, B * block_bytes]."""
    split, dtype = blocks.unflatten(1, (-1, KINDS[kind].block_bytes)), KINDS[kind].factor_dtype
    length = KINDS[kind].num_factors * dtype.itemsize
    stored = torch.stack([split[:, :, at : at + length] for at in KINDS[kind].factors_at])
    factors = stored.view(dtype).float().flatten(2)
    if KINDS[kind].has_minimums and not KINDS[kind].has_scales:
        factors[1].neg_()
    return factors


def has_finite_factors(kind: str, blocks: Tensor) -> bool:
    """Return whether the factors of a file's blocks uint8 [N, B * block_bytes] are all finite, and not negative if
    they are float8, which ggml stores without a sign."""
    library, are_finite = build.library(), torch.ones(1, dtype=torch.bool)
    if library is None:
        factors = read_factors(kind, blocks)
        return bool((factors.isfinite() & ~(factors.signbit() & KINDS[kind].has_global_scale)).all())
    blocks = blocks.contiguous()
    num_blocks = blocks.numel() // KINDS[kind].block_bytes
    library.check_factors(blocks.data_ptr(), CODES[kind.lower()], num_blocks, are_finite.data_ptr())
    return bool(are_finite)


def _shifts(*counts: int) -> Tensor:
    return torch.tensor(counts, dtype=torch.uint8)[:, None]


def _six_bits(packed: Tensor) -> Tensor:
    """Return the scales and minimums int8 [2, N, 8 * B], stored in uint8 [N, B, 12] with six bits each.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 hold minimums 0-3, in the lower six bits. Bytes 8-11 hold the lower four
    bits of scales 4-7 and minimums 4-7. Their upper two bits are the upper two bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed.split(4, 2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 2)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 2)
    return torch.stack((scales, minimums)).flatten(2).view(torch.int8)


def _centred_six_bits(packed: Tensor) -> Tensor:
    """Return the scales int8 [1, N, 16 * B], stored plus 32 in uint8 [N, B, 12] with six bits each.

    Bytes 0-7 hold the lower four bits of scales 0-7 and, in their upper halves, of scales 8-15. Byte 8 + i holds the
    upper two bits of scales i, i + 4, i + 8 and i + 12.
    """
    first, last = packed.split((8, 4), 2)
    low, high = torch.cat((first & 15, first >> 4), 2), last.unsqueeze(2) >> _shifts(0, 2, 4, 6)  # [N, B, 4, 4]
    scales: Tensor = (low | (high & 3).flatten(2) << 4).view(torch.int8) - SCALE_OFFSET
    return scales.flatten(1)[None]


@dataclass(frozen=True)
class BlockWeight:
    """A weight [N, K] in the blocks and the order that a kernel reads. K is a multiple of the kind's block size.

    `memory` uint8 [bytes] may be mapped from a file. For each tile of 16 outputs and each of its blocks it holds:

    - factors: float16 [1 or 2, 16], or of eight bits [1, groups of a block, 16]
    - scales: int8 [1 or 2, groups of a block, 16], if the kind has scales; scales of six bits, plus 32, are bytes
      [3, 64], packed from [4, 64] by `_pack_six_bits`
    - codes of three bits, per 32 inputs: bytes [3, 16, 4], packed by `_pack_six_bits` from [4, 16, 4], with inputs 0-3
      of eight in the lower three bits and inputs 4-7 in the upper three bits
    - codes of more bits, per 32 inputs: the lower four bits as bytes [4, 16, 4], with inputs 0-3 of eight in the lower
      half and inputs 4-7 in the upper half; then the remaining bits, [1, 16, 4] for 5 bits (bit s belongs to inputs 4 s
      to 4 s + 3) or [2, 16, 4] for 6 bits (two bits from each of four groups of four inputs).

    After the tiles: the global scale, float64, if the kind has one.

    Raises ValueError for memory of another size or dtype.
    """

    memory: Tensor
    num_outputs: int
    num_inputs: int
    kind: str

    is_compressed: ClassVar = False

    def __post_init__(self) -> None:
        size = self._tile_bytes + GLOBAL_BYTES * KINDS[self.kind].has_global_scale
        fits = self.memory.dtype == torch.uint8 and self.memory.shape == (size,) and self.memory.is_contiguous()
        if not fits or self.num_inputs % KINDS[self.kind].block_size:
            raise ValueError(
                f"a packed weight of {size} bytes, of {self.num_inputs} inputs in blocks of {KINDS[self.kind].block_size}, "
                f"cannot be {tuple(self.memory.shape)} {self.memory.dtype}"
            )

    @cached_property
    def format(self) -> PackedFormat:
        return PackedFormat(KINDS[self.kind].group_size, self.kind.lower(), KINDS[self.kind].has_minimums)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"packed": self.memory}

    @property
    def num_tiles(self) -> int:
        return -(-self.num_outputs // TILE)

    @property
    def global_scale(self) -> float:
        return float(self.memory[-GLOBAL_BYTES:].view(torch.float64)) if KINDS[self.kind].has_global_scale else 1.0

    @property
    def _num_blocks(self) -> int:
        return self.num_inputs // KINDS[self.kind].block_size

    @property
    def _tile_bytes(self) -> int:
        """Bytes of all tiles."""
        return self.num_tiles * self._num_blocks * KINDS[self.kind].packed_bytes

    def unpack(self) -> BlockCodes:
        return self.unpack_tiles(0, self.num_tiles)

    def unpack_tiles(self, first: int, last: int) -> BlockCodes:
        """Unpack only outputs 16 * first to 16 * last - 1."""
        kind, count = KINDS[self.kind], min(self.num_outputs, last * TILE) - first * TILE
        parts = 1 + kind.has_minimums
        groups = kind.block_size // kind.group_size if kind.has_scales else 0
        blocks = self.memory[: self._tile_bytes].view(self.num_tiles, self._num_blocks, -1)[first:last]
        factors, scales, codes = (part.contiguous() for part in blocks.split(kind.part_bytes, 2))
        factors = factors.view(kind.factor_dtype).float().view(last - first, self._num_blocks, parts, -1, TILE)
        if kind.scale_bits == 6:
            scales = _unpack_six_bits(scales.unflatten(2, (3, -1))).flatten(2) - SCALE_OFFSET
        scales = scales.view(torch.int8).view(last - first, self._num_blocks, parts, groups, TILE)
        return BlockCodes(
            self.kind,
            _codes_of(codes.unflatten(2, (kind.block_size // UNIT, -1, TILE, 4)), kind.bits)[:count],
            factors.permute(2, 0, 4, 1, 3).flatten(3, 4).flatten(1, 2)[:, :count],
            scales.permute(2, 0, 4, 1, 3).flatten(3, 4).flatten(1, 2)[:, :count],
            self.global_scale,
        )

    def slice_outputs(self, outputs: slice) -> "BlockWeight":
        """Return the weight of the given outputs, copied."""
        first, last, _ = outputs.indices(self.num_outputs)
        memory = _pack_rows(self.unpack().rows(first, last))
        return BlockWeight(_with_scale(memory, self.kind, self.global_scale), last - first, self.num_inputs, self.kind)


def pack_blocks(kind: str, blocks: Tensor, global_scale: float = 1.0) -> BlockWeight:
    """Pack a file's blocks uint8 [N, bytes]. global_scale: as in BlockCodes."""
    num_outputs, num_blocks = len(blocks), blocks.shape[1] // KINDS[kind].block_bytes
    num_inputs, library = num_blocks * KINDS[kind].block_size, build.library()
    if library is None:
        memory = pack_portably(kind, blocks)
    else:
        memory = torch.empty(-(-num_outputs // TILE) * num_blocks * KINDS[kind].packed_bytes, dtype=torch.uint8)
        blocks = blocks.contiguous()
        library.pack_blocks(blocks.data_ptr(), CODES[kind.lower()], num_outputs, num_inputs, memory.data_ptr())
    return BlockWeight(_with_scale(memory, kind, global_scale), num_outputs, num_inputs, kind)


def _with_scale(tiles: Tensor, kind: str, global_scale: float) -> Tensor:
    if not KINDS[kind].has_global_scale:
        return tiles
    return torch.cat((tiles, torch.tensor([global_scale], dtype=torch.float64).view(torch.uint8)))


def pack_portably(kind: str, blocks: Tensor) -> Tensor:
    """Return the tiles of `pack_blocks`, computed a part of the outputs at a time. pack_blocks.cpp writes equal bytes."""
    num_inputs = blocks.shape[1] // KINDS[kind].block_bytes * KINDS[kind].block_size
    at_once = max(1, PACKED_AT_ONCE // num_inputs // TILE) * TILE
    return torch.cat([_pack_rows(read_blocks(kind, rows)) for rows in blocks.split(at_once)])


def _pack_rows(rows: BlockCodes) -> Tensor:
    kind, num_blocks = KINDS[rows.kind], rows.codes.shape[1] // KINDS[rows.kind].block_size
    missing = -len(rows.codes) % TILE
    codes = functional.pad(rows.codes, (0, 0, 0, missing))
    tiles = len(codes) // TILE
    codes = codes.view(tiles, TILE, num_blocks, -1, 8, 4).permute(0, 2, 3, 4, 1, 5)  # [tiles, B, units, 8, 16, 4]
    even, odd, rest = codes[:, :, :, ::2], codes[:, :, :, 1::2], kind.bits % 8 - 4
    if kind.bits == 8:
        parts = [codes]
    elif kind.bits == 3:
        parts = [_pack_six_bits((even | odd << 3).flatten(4))]
    else:
        parts = [even & 15 | odd << 4]
    if rest > 0:
        steps = (codes >> 4).unflatten(3, (rest, 8 // rest))
        shifts = torch.arange(0, 8, rest, dtype=torch.uint8)[:, None, None]
        parts.append((steps << shifts).sum(4, dtype=torch.uint8))
    numbers = []
    for scales, dtype in ((rows.factors, kind.factor_dtype), (rows.scales, torch.int8)):
        padded = functional.pad(scales, (0, 0, 0, missing)).unflatten(1, (tiles, TILE))  # [parts, tiles, 16, B or G]
        in_blocks = padded.unflatten(3, (num_blocks, scales.shape[2] // num_blocks)).permute(1, 3, 0, 4, 2)
        numbers.append(in_blocks.contiguous().to(dtype).view(torch.uint8).flatten(2))  # [tiles, B, bytes]
    if kind.scale_bits == 6:
        numbers[1] = _pack_six_bits((numbers[1] + SCALE_OFFSET).unflatten(2, (4, -1))).flatten(2)
    return torch.cat((*numbers, torch.cat(parts, 3).flatten(2)), 2).flatten()


def _codes_of(units: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [N, K] from packed codes [tiles, B, units, bits, 16, 4]."""
    if bits == 8:
        return units.permute(0, 4, 1, 2, 3, 5).flatten(2).flatten(0, 1)
    if bits == 3:
        pairs, half = _unpack_six_bits(units.flatten(4)).unflatten(4, (TILE, 4)), 3
    else:
        pairs, half = units[:, :, :, :4], 4
    codes = torch.stack((pairs & 2**half - 1, pairs >> half), 4).flatten(3, 4)  # [tiles, B, units, 8, 16, 4]
    if (rest := bits - 4) > 0:
        shifts = torch.arange(0, 8, rest, dtype=torch.uint8)[:, None, None]
        high = units[:, :, :, 4:].unsqueeze(4) >> shifts & 2**rest - 1
        codes = codes | high.flatten(3, 4) << 4
    return codes.permute(0, 4, 1, 2, 3, 5).flatten(2).flatten(0, 1)


def _pack_six_bits(numbers: Tensor) -> Tensor:
    """Return six-bit numbers uint8 [..., 4, V] in three quarters of the bytes, [..., 3, V].

    The bytes of the first three numbers hold two bits of the fourth one each, the lowest bits first.
    """
    first, last = numbers.split((3, 1), -2)
    packed: Tensor = first | (last >> _shifts(0, 2, 4) & 3) << 6
    return packed


def _unpack_six_bits(packed: Tensor) -> Tensor:
    """Return the numbers uint8 [..., 4, V] of bytes [..., 3, V]."""
    last = (packed >> 6 << _shifts(0, 2, 4)).sum(-2, keepdim=True, dtype=torch.uint8)
    return torch.cat((packed & 63, last), -2)
