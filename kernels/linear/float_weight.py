"""The packed form of a floating-point weight. N outputs, K inputs."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.compressed import check_exceptions, check_size, compress, decompress

TILE = 16  # outputs in one vector register
INPUTS_OF_STEP = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}
"""Inputs of one output that a kernel multiplies at once, by dtype."""


@dataclass(frozen=True)
class FloatWeight:
    """A weight [N, K] in the order in which a kernel reads it, stored instead of the plain weight.

    `memory` is float32, float16 or bfloat16 [ceil(N / 16), ceil(K / P), 16, P], padded with zeros: P inputs of one
    output (`INPUTS_OF_STEP`), then 16 outputs, then the inputs. Or it is bfloat16 compressed to 12 bits, uint8 [bytes],
    as in compressed.py. It may be mapped from a file.
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
        """The dtype of the weight and of its products."""
        return torch.bfloat16 if self.is_compressed else self.memory.dtype

    @property
    def format(self) -> torch.dtype:
        """Return a key. Weights with equal keys and equal numbers of inputs can be multiplied together."""
        return self.dtype

    @property
    def _num_tiles_and_steps(self) -> tuple[int, int]:
        return -(-self.num_outputs // TILE), -(-self.num_inputs // INPUTS_OF_STEP[self.dtype])

    def check(self) -> None:
        """Raise ValueError if a kernel would read out of bounds because of the contents of a file."""
        if self.is_compressed:
            check_exceptions(self.memory, *self._num_tiles_and_steps)

    def unpack(self) -> Tensor:
        tiles = decompress(self.memory, *self._num_tiles_and_steps) if self.is_compressed else self.memory
        rows = tiles.transpose(1, 2).reshape(len(tiles) * TILE, -1)
        return rows[: self.num_outputs, : self.num_inputs].contiguous()

    def slice_outputs(self, outputs: slice) -> "FloatWeight":
        """Return the weight of the given outputs, copied."""
        return pack(self.unpack()[outputs])


def pack(weight: Tensor) -> FloatWeight:
    """Pack a weight [N, K] of float32, bfloat16 or float16. bfloat16 is compressed if that makes products faster.
    Raises ValueError for other dtypes."""
    if weight.dtype not in INPUTS_OF_STEP:
        raise ValueError(f"a weight of {weight.dtype} cannot be packed: only {', '.join(map(str, INPUTS_OF_STEP))}")
    num_outputs, num_inputs = weight.shape
    per_step = INPUTS_OF_STEP[weight.dtype]
    missing = -num_inputs % per_step, -num_outputs % TILE
    if any(missing):  # pad copies even if nothing is missing
        weight = functional.pad(weight, (0, missing[0], 0, missing[1]))
    # torch moves words of 32 bits three times as fast as pairs of 16-bit numbers.
    word = torch.int16 if weight.dtype == torch.float16 else torch.int32
    words = weight.contiguous().view(word)  # [N, K / P]
    tiles = words.view(len(words) // TILE, TILE, -1).transpose(1, 2).contiguous()
    tiles = tiles.view(weight.dtype).unflatten(2, (TILE, per_step))
    return FloatWeight(compress(tiles) if weight.dtype == torch.bfloat16 else tiles, num_outputs, num_inputs)
