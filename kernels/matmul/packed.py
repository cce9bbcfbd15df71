"""The packed form of a weight. N outputs, K inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.build import addresses
from kernels.matmul.compressed import check_exceptions, check_size, compress, decompress

TILE = 16  # outputs that a vector register holds beside each other
INPUTS_OF_STEP = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 1,
}  # of one output, which a kernel multiplies at once


@dataclass(frozen=True)
class PackedMatrix:
    """A weight [N, K] in the order in which a kernel reads it; it takes the weight's place.

    `tiles` [ceil(N / 16), ceil(K / P), 16, P] float32, float16 or bfloat16: P inputs of one output (`INPUTS_OF_STEP`), then come 16
    outputs, then the inputs. Zeros fill it up. Or those of bfloat16 in 12 bits each, uint8 [bytes], as compressed.py says.
    A file may hold it, and it may be mapped from there.
    """

    tiles: Tensor
    num_outputs: int
    num_inputs: int

    def __post_init__(self) -> None:
        if self.dtype not in INPUTS_OF_STEP:
            raise ValueError(f"packed weights cannot be of {self.dtype}")
        shape = (*self._num_tiles_and_steps, TILE, INPUTS_OF_STEP[self.dtype])
        if self.is_compressed:
            check_size(self.tiles, *self._num_tiles_and_steps)
        elif self.tiles.shape != shape or not self.tiles.is_contiguous():
            raise ValueError(f"packed weights {list(shape)} cannot be {list(self.tiles.shape)} of {self.tiles.dtype}")

    @property
    def is_compressed(self) -> bool:
        return self.tiles.dtype == torch.uint8

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return torch.bfloat16 if self.is_compressed else self.tiles.dtype

    @property
    def _num_tiles_and_steps(self) -> tuple[int, int]:
        return -(-self.num_outputs // TILE), -(-self.num_inputs // INPUTS_OF_STEP[self.dtype])

    def check(self) -> None:
        """Of numbers that come from a file: ValueError where a kernel would read behind them."""
        if self.is_compressed:
            check_exceptions(self.tiles, *self._num_tiles_and_steps)

    def unpack(self) -> Tensor:
        """The weight [N, K]."""
        tiles = decompress(self.tiles, *self._num_tiles_and_steps) if self.is_compressed else self.tiles
        rows = tiles.transpose(1, 2).reshape(len(tiles) * TILE, -1)
        return rows[: self.num_outputs, : self.num_inputs].contiguous()


class PackedMatrices:
    """Weights of one shape and dtype, each for rows of its own. Raises ValueError if they are not."""

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        self.matrices = tuple(matrices)
        self.first = matrices[0]
        self.addresses = addresses(matrix.tiles for matrix in matrices)
        self.are_compressed = torch.tensor([matrix.is_compressed for matrix in matrices], dtype=torch.int32)
        kinds = {(m.num_outputs, m.num_inputs, m.dtype) for m in matrices}
        if len(kinds) > 1:
            raise ValueError(f"weights of several shapes or dtypes cannot share a product: {kinds}")


def pack(weight: Tensor) -> PackedMatrix:
    """weight [N, K] float32, bfloat16 or float16; bfloat16 is compressed where that is a gain. Raises ValueError for another dtype."""
    if weight.dtype not in INPUTS_OF_STEP:
        raise ValueError(f"a weight of {weight.dtype} cannot be packed: only {', '.join(map(str, INPUTS_OF_STEP))}")
    num_outputs, num_inputs = weight.shape
    per_step = INPUTS_OF_STEP[weight.dtype]
    missing = -num_inputs % per_step, -num_outputs % TILE
    if any(missing):  # pad copies, whatever is missing
        weight = functional.pad(weight, (0, missing[0], 0, missing[1]))
    word = (
        torch.int16 if weight.dtype == torch.float16 else torch.int32
    )  # moved three times as fast as two numbers of 16 bits
    words = weight.contiguous().view(word)  # [N, K / P]
    tiles = words.view(len(words) // TILE, TILE, -1).transpose(1, 2).contiguous()
    tiles = tiles.view(weight.dtype).unflatten(2, (TILE, per_step))
    return PackedMatrix(compress(tiles) if weight.dtype == torch.bfloat16 else tiles, num_outputs, num_inputs)
