"""The packed form of a weight of floats. N outputs, K inputs."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.compressed import check_exceptions, check_size, compress, decompress

TILE = 16  # outputs that a vector register holds beside each other
INPUTS_OF_STEP = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}
"""Inputs of one output that a kernel multiplies at once."""


@dataclass(frozen=True)
class FloatWeight:
    """A weight [N, K] in the order in which a kernel reads it; it takes the weight's place.

    `memory` [ceil(N / 16), ceil(K / P), 16, P] float32, float16 or bfloat16: P inputs of one output (`INPUTS_OF_STEP`), then come 16
    outputs, then the inputs. Zeros fill it up. Or those of bfloat16 in 12 bits each, uint8 [bytes], as compressed.py says.
    A file may hold it, and it may be mapped from there.
    """

    memory: Tensor
    num_outputs: int
    num_inputs: int

    def __post_init__(self) -> None:
        if self.dtype not in INPUTS_OF_STEP:
            raise ValueError(f"packed weights cannot be of {self.dtype}")
        shape = (*self._num_tiles_and_steps, TILE, INPUTS_OF_STEP[self.dtype])
        if self.is_compressed:
            check_size(self.memory, *self._num_tiles_and_steps)
        elif self.memory.shape != shape or not self.memory.is_contiguous():
            raise ValueError(f"packed weights {list(shape)} cannot be {list(self.memory.shape)} of {self.memory.dtype}")

    @cached_property
    def is_compressed(self) -> bool:
        return self.memory.dtype == torch.uint8

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight, and of its products."""
        return torch.bfloat16 if self.is_compressed else self.memory.dtype

    @property
    def format(self) -> torch.dtype:
        """Return the key that weights must share, besides their inputs, to be multiplied together."""
        return self.dtype

    @property
    def _num_tiles_and_steps(self) -> tuple[int, int]:
        return -(-self.num_outputs // TILE), -(-self.num_inputs // INPUTS_OF_STEP[self.dtype])

    def check(self) -> None:
        """Raise ValueError where a kernel would read past numbers that come from a file."""
        if self.is_compressed:
            check_exceptions(self.memory, *self._num_tiles_and_steps)

    def unpack(self) -> Tensor:
        """Return the weight [N, K]."""
        tiles = decompress(self.memory, *self._num_tiles_and_steps) if self.is_compressed else self.memory
        rows = tiles.transpose(1, 2).reshape(len(tiles) * TILE, -1)
        return rows[: self.num_outputs, : self.num_inputs].contiguous()

    def slice_outputs(self, outputs: slice) -> "FloatWeight":
        """Return the weight of some outputs: a copy."""
        return pack(self.unpack()[outputs])


def pack(weight: Tensor) -> FloatWeight:
    """Pack a weight [N, K] of float32, bfloat16 or float16; bfloat16 is compressed where that is a gain. Raises ValueError for others."""
    if weight.dtype not in INPUTS_OF_STEP:
        raise ValueError(f"a weight of {weight.dtype} cannot be packed: only {', '.join(map(str, INPUTS_OF_STEP))}")
    num_outputs, num_inputs = weight.shape
    per_step = INPUTS_OF_STEP[weight.dtype]
    missing = -num_inputs % per_step, -num_outputs % TILE
    if any(missing):  # pad copies, whatever is missing
        weight = functional.pad(weight, (0, missing[0], 0, missing[1]))
    # Words of 32 bits are moved three times as fast as two numbers of 16.
    word = torch.int16 if weight.dtype == torch.float16 else torch.int32
    words = weight.contiguous().view(word)  # [N, K / P]
    tiles = words.view(len(words) // TILE, TILE, -1).transpose(1, 2).contiguous()
    tiles = tiles.view(weight.dtype).unflatten(2, (TILE, per_step))
    return FloatWeight(compress(tiles) if weight.dtype == torch.bfloat16 else tiles, num_outputs, num_inputs)
