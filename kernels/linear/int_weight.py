"""The packed form of an integer weight. N outputs, K inputs, G groups of inputs."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.float_weight import TILE

CODES = {  # `enum class Codes` in products.h
    name: number
    for number, name in enumerate(
        "none int8 int4 float8 q4_1 q5_0 q5_1 q4_k q5_k q6_k q3_k q4_0 q8_0 iq4_nl iq4_xs mxfp4 nvfp4".split()
    )
}
GROUP_SIZES = (128, 64, 32)  # or all inputs
MAX_INPUTS = 2**17 - 1  # the sum of more int8 products does not fit into 32 bits


class PackedFormat(NamedTuple):
    """The properties that weights must share, in addition to their inputs, to be multiplied together."""

    group_size: int
    codes: str  # a key of CODES
    has_zero_points: bool


@dataclass(frozen=True)
class IntWeight:
    """An integer weight [N, K] in the order in which a kernel reads it.

    A value is (code[o, i] - zero[o, g]) * scale[o, g] for output o, input i and group g = i // group_size. `memory`
    uint8 [bytes] may be mapped from a file. It holds three parts in order:

    - codes: 8 bits: bytes [tiles, K / 4, 16, 4] (plus 128); 4 bits: bytes [tiles, K / 8, 16, 4] with inputs 0-3 in the
      lower and inputs 4-7 in the upper four bits (plus 8 if symmetric). A tile is 16 outputs. K is rounded up to a
      multiple of 8, N to a multiple of 16.
    - scales: float32 [tiles, G, 16]
    - zero points, unless symmetric: int8 [tiles, G, 16]
    """

    memory: Tensor
    num_outputs: int
    num_inputs: int
    group_size: int
    bits: int
    has_zero_points: bool

    is_compressed: ClassVar = False

    def __post_init__(self) -> None:
        if self.group_size not in (self.num_inputs, *GROUP_SIZES) or not 0 < self.num_inputs <= MAX_INPUTS:
            raise ValueError(
                f"{self.num_inputs} inputs in groups of {self.group_size}: a kernel adds 1 to {MAX_INPUTS}, in groups of 32, 64, 128 or all"
            )
        _check_bits(self.bits, self.has_zero_points)
        if (
            self.memory.dtype != torch.uint8
            or self.memory.shape != (sum(self._part_sizes()),)
            or not self.memory.is_contiguous()
        ):
            raise ValueError(
                f"a packed weight of {sum(self._part_sizes())} bytes cannot be {tuple(self.memory.shape)} {self.memory.dtype}"
            )

    @cached_property
    def format(self) -> PackedFormat:
        return PackedFormat(self.group_size, f"int{self.bits}", self.has_zero_points)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"packed": self.memory}

    @property
    def num_groups(self) -> int:
        return -(-self.num_inputs // self.group_size)

    @property
    def num_tiles(self) -> int:
        return -(-self.num_outputs // TILE)

    def _part_sizes(self) -> tuple[int, int, int]:
        numbers = self.num_tiles * TILE * self.num_groups
        codes = self.num_tiles * TILE * -(-self.num_inputs // 8) * self.bits
        return codes, 4 * numbers, numbers if self.has_zero_points else 0

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the arguments of `pack`: codes int8 [N, K], scales float32 [N, G], zero points int8 [N, G] or None."""
        return self.unpack_tiles(0, self.num_tiles)

    def slice_outputs(self, outputs: slice) -> "IntWeight":
        """Return the weight of the given outputs, copied."""
        codes, scales, zero_points = self.unpack()
        zero_points = None if zero_points is None else zero_points[outputs]
        return pack(codes[outputs], scales[outputs], zero_points, self.bits)

    def unpack_tiles(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Unpack only outputs 16 * first to 16 * last - 1."""
        codes, scales, zeros = self.memory.split(self._part_sizes())
        words = codes.view(self.num_tiles, -1, TILE, 4)[first:last]
        num_outputs = min(self.num_outputs, last * TILE) - first * TILE
        if self.bits == 8:
            columns = (words ^ 128).view(torch.int8)[:, :, None]  # [tiles, K/4, 1, 16, 4]
        else:
            columns = torch.stack((words & 15, words >> 4), dim=2).view(torch.int8) - (0 if self.has_zero_points else 8)
        plain = columns.permute(0, 3, 1, 2, 4).reshape((last - first) * TILE, -1)[:num_outputs, : self.num_inputs]

        def per_group(part: Tensor, dtype: torch.dtype) -> Tensor:
            tiles = part.view(dtype).view(self.num_tiles, self.num_groups, TILE)[first:last]
            return tiles.transpose(1, 2).reshape(-1, self.num_groups)[:num_outputs]

        zero_points = per_group(zeros, torch.int8) if self.has_zero_points else None
        return plain.contiguous(), per_group(scales, torch.float32), zero_points


def known_group_size(num_inputs: int, num_groups: int) -> int | None:
    """Return the group size that gives `num_groups`: all inputs, 128, 64 or 32. None if there is none."""
    return next((size for size in (num_inputs, *GROUP_SIZES) if -(-num_inputs // size) == num_groups), None)


def find_group_size(num_inputs: int, num_groups: int) -> int:
    """Return `known_group_size`. Raises ValueError if it is None."""
    size = known_group_size(num_inputs, num_groups)
    if size is None:
        raise ValueError(
            f"{num_groups} groups of {num_inputs} inputs: a group has 32, 64 or 128 inputs, or all of them"
        )
    return size


def pack(codes: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> IntWeight:
    """Pack codes int8 [N, K], scales float32 [N, G], and zero points int8 [N, G] or None if symmetric.

    `bits` is 8 (symmetric) or 4 (codes -8 to 7 if symmetric, else codes 0 to 15 and zero points -112 to 127). A group
    has 32, 64, 128 or all K inputs; the last group may be smaller. Raises ValueError for other arguments.
    """
    num_outputs, num_inputs = codes.shape
    group_size = find_group_size(num_inputs, scales.shape[1])
    check_codes(codes, scales, zero_points, bits)
    rows, columns = -num_outputs % TILE, -num_inputs % 8
    if bits == 8:
        parts = [_in_tiles(functional.pad(codes.view(torch.uint8) ^ 128, (0, columns, 0, rows)))]
    else:
        halves = functional.pad((codes + (8 if zero_points is None else 0)).view(torch.uint8), (0, columns, 0, rows))
        halves = halves.view(num_outputs + rows, -1, 2, 4)  # [N, K/8, 2, 4]
        parts = [_in_tiles((halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1))]
    for numbers in (scales, zero_points):
        if numbers is not None:
            padded = functional.pad(numbers, (0, 0, 0, rows)).view(-1, TILE, numbers.shape[1])
            parts.append(padded.transpose(1, 2).contiguous().view(torch.uint8).flatten())
    return IntWeight(torch.cat(parts), num_outputs, num_inputs, group_size, bits, zero_points is not None)


def _in_tiles(codes: Tensor) -> Tensor:
    """Return codes uint8 [N, C] in tiles of 16 outputs and columns of 4 bytes."""
    words = codes.contiguous().view(torch.int32)  # torch moves words four times as fast as groups of four bytes
    return words.view(len(words) // TILE, TILE, -1).transpose(1, 2).reshape(-1).view(torch.uint8)


def _check_bits(bits: int, has_zero_points: bool) -> None:
    if bits not in (4, 8) or (bits == 8 and has_zero_points):
        raise ValueError(
            f"{bits} bits with{'' if has_zero_points else 'out'} zero points: only 4 and 8, and zero points with 4"
        )


def check_codes(codes: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> None:
    """Raise ValueError for codes that no kernel supports."""
    _check_bits(bits, zero_points is not None)
    if (
        codes.dtype != torch.int8
        or scales.dtype != torch.float32
        or (zero_points is not None and zero_points.dtype != torch.int8)
    ):
        raise ValueError("codes and zero points are int8, scales float32")
    if scales.shape[0] != codes.shape[0] or (zero_points is not None and zero_points.shape != scales.shape):
        raise ValueError(
            f"scales {list(scales.shape)} and their zero points do not belong to codes {list(codes.shape)}"
        )
    if not 0 < codes.shape[1] <= MAX_INPUTS:
        raise ValueError(f"{codes.shape[1]} inputs: a kernel adds 1 to {MAX_INPUTS}")
    if bits == 4 and codes.numel():
        least, largest = (int(end) for end in codes.aminmax())
        allowed = (-8, 7) if zero_points is None else (0, 15)
        if least < allowed[0] or largest > allowed[1]:
            raise ValueError(f"codes of 4 bits from {least} to {largest}: they go from {allowed[0]} to {allowed[1]}")
    if zero_points is not None and zero_points.numel() and int(zero_points.min()) < -112:
        raise ValueError(f"a zero point of {int(zero_points.min())}: from -112 on, a code minus it fits 8 bits")
