"""The packed form of a float8 weight. N outputs, K inputs, G groups of inputs."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.float_weight import TILE
from kernels.linear.int_weight import PackedFormat

VECTOR_INPUTS = 4  # inputs that a kernel expands at once


@dataclass(frozen=True)
class Float8Weight:
    """A float8 weight [N, K] in the order in which a kernel reads it.

    A value is code[o, i] * scale[o, i // group_size] for output o and input i. K is a multiple of the group size.

    `memory` uint8 [bytes] may be mapped from a file. It holds two parts in order:

    - codes float8_e4m3fn [tiles, vectors, 64]: a tile is 16 outputs, a vector is 4 inputs of a group, padded with
      zeros. Byte 16 q + 8 s + 2 r + p of a vector is input 2 s + p of output 4 q + r.
    - scales: float32 [tiles, G, 16]. The scale of a group with NaN among its codes is NaN.

    Raises ValueError for memory of another size or dtype.
    """

    memory: Tensor
    num_outputs: int
    num_inputs: int
    group_size: int

    is_compressed: ClassVar = False

    def __post_init__(self) -> None:
        size = sum(self._part_sizes())
        fits = self.memory.dtype == torch.uint8 and self.memory.shape == (size,) and self.memory.is_contiguous()
        if not fits or self.num_inputs % self.group_size:
            raise ValueError(
                f"a packed weight of {size} bytes, in groups of {self.group_size} of {self.num_inputs} inputs, cannot be "
                f"{tuple(self.memory.shape)} {self.memory.dtype}"
            )

    @cached_property
    def format(self) -> PackedFormat:
        return PackedFormat(self.group_size, "float8", has_zero_points=False)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"packed": self.memory}

    @property
    def num_groups(self) -> int:
        return self.num_inputs // self.group_size

    @property
    def num_tiles(self) -> int:
        return -(-self.num_outputs // TILE)

    def _part_sizes(self) -> tuple[int, int]:
        groups = self.num_tiles * TILE * self.num_groups
        return groups * -(-self.group_size // VECTOR_INPUTS) * VECTOR_INPUTS, 4 * groups

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return codes float8_e4m3fn [N, K] and scales float32 [N, G]."""
        codes, scales = self.memory.split(self._part_sizes())
        vectors = codes.view(self.num_tiles, -1, 4, 2, 4, 2)  # [tiles, vectors, q, s, r, p]
        plain = vectors.permute(0, 2, 4, 1, 3, 5).reshape(self.num_tiles * TILE, self.num_groups, -1)
        plain = plain[: self.num_outputs, :, : self.group_size].flatten(1)
        tiles = scales.view(torch.float32).view(self.num_tiles, self.num_groups, TILE)
        groups = tiles.transpose(1, 2).reshape(-1, self.num_groups)[: self.num_outputs]
        return plain.contiguous().view(torch.float8_e4m3fn), groups.contiguous()

    def slice_outputs(self, outputs: slice) -> "Float8Weight":
        """Return the weight of the given outputs, copied."""
        codes, scales = self.unpack()
        return pack(codes[outputs], scales[outputs])


def pack(codes: Tensor, scales: Tensor) -> Float8Weight:
    """Pack codes float8_e4m3fn [N, K] and scales float32 [N, G], or [1, 1] for the whole weight. Raises ValueError for
    other dtypes or shapes."""
    (num_outputs, num_inputs), num_groups = codes.shape, scales.shape[1]
    if codes.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        raise ValueError(f"codes of {codes.dtype} and scales of {scales.dtype}: they are float8_e4m3fn and float32")
    if (
        scales.shape != (1, 1)
        and len(scales) != num_outputs
        or min(num_inputs, num_groups) == 0
        or num_inputs % num_groups
    ):
        raise ValueError(f"scales {list(scales.shape)} do not divide codes {list(codes.shape)} into groups of one size")
    size, rows = num_inputs // num_groups, -num_outputs % TILE
    plain = codes.view(torch.uint8).unflatten(1, (num_groups, size))  # [N, G, size]
    has_nan = ((plain & 127) == 127).any(2)
    scales = torch.where(has_nan, torch.nan, scales)
    padded = functional.pad(plain, (0, -size % VECTOR_INPUTS, 0, 0, 0, rows)).flatten(1)
    vectors = padded.view(-1, 4, 4, padded.shape[1] // VECTOR_INPUTS, 2, 2)  # [tiles, q, r, vectors, s, p]
    packed = vectors.permute(0, 3, 1, 4, 2, 5).reshape(-1)
    tiles = functional.pad(scales, (0, 0, 0, rows)).view(-1, TILE, num_groups).transpose(1, 2)
    memory = torch.cat([packed, tiles.contiguous().view(torch.uint8).flatten()])
    return Float8Weight(memory, num_outputs, num_inputs, size)
