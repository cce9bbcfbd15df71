"""Lossless compression of bfloat16 weights to 12 bits per number. Weights use few exponents (measured in arXiv
2504.11651), and so few upper bytes.

T tiles of S steps, each step 16 outputs of 2 inputs; G groups of 4 steps in a tile; X exceptions: numbers whose upper
byte is not in the table.

A compressed weight is uint8 [bytes], with these parts in order:

- the table of 16 upper bytes (sign and all but the last bit of the exponent), then zeros up to 64 bytes
- groups [T, G, 192]: 64 lower bytes of the first two steps, 64 lower bytes of the last two steps, and 64 bytes with two
  table indices each: the lower half for the first two steps, the upper half for the last two. Within a pair of steps, 8
  numbers of the first alternate with 8 numbers of the second.
- the index of each tile's first exception: uint32 [T]
- exceptions: uint32 [X, 2], the index of the number in the tile and the number itself. An end marker with index NOWHERE
  follows the exceptions of each tile.
"""

import torch
from torch import Tensor

from kernels import build

STEP, GROUP = 32, 128  # numbers
GROUP_BYTES = 192
HEADER_BYTES = 64
NUM_UPPER = 16
NOWHERE = -1  # as int32

MIN_BYTES = 2**20  # smaller weights may be in the CPU's cache, where 12 bits take 1.1 times as long
# Fraction of all numbers. With this many exceptions a row still takes 0.78 of the time. Normally distributed weights
# have 1 / 13,000.
MAX_EXCEPTIONS = 1 / 256


def is_gain(num_bytes: int) -> bool:
    """Return whether 12 bits make products with a bfloat16 weight of this size faster on this machine, if it has few
    exceptions."""
    return build.library() is not None and build.instruction_set() != "avx2" and num_bytes >= MIN_BYTES


def compress(tiles: Tensor) -> Tensor:
    """Return tiles bfloat16 [T, S, 16, 2] compressed, or unchanged if compression does not make products faster.

    With AVX2 it does not: decompression takes as long as the smaller reads save.
    """
    if not is_gain(tiles.nbytes):
        return tiles
    upper_bytes, num_exceptions = common_upper_bytes(tiles)
    if num_exceptions > MAX_EXCEPTIONS * tiles.numel():
        return tiles
    return compress_with(upper_bytes, num_exceptions, tiles)


def common_upper_bytes(tiles: Tensor) -> tuple[Tensor, int]:
    """Return the 16 most frequent upper bytes, uint8, and the number of exceptions."""
    counts = torch.empty(256, dtype=torch.int64)
    _library().count_upper_bytes(tiles.data_ptr(), tiles.numel(), counts.data_ptr())
    upper_bytes = counts.argsort(descending=True, stable=True)[:NUM_UPPER]
    return upper_bytes.byte(), tiles.numel() - int(counts[upper_bytes].sum())


def compress_with(upper_bytes: Tensor, num_exceptions: int, tiles: Tensor) -> Tensor:
    """Compress tiles with the results of `common_upper_bytes`."""
    num_tiles, num_steps = tiles.shape[:2]
    memory = torch.empty(_fixed_bytes(num_tiles, num_steps) + 8 * (num_tiles + num_exceptions), dtype=torch.uint8)
    memory[:HEADER_BYTES] = 0
    memory[:NUM_UPPER] = upper_bytes
    _library().compress(tiles.data_ptr(), num_tiles, num_steps, memory.data_ptr())
    return memory


def decompress(memory: Tensor, num_tiles: int, num_steps: int) -> Tensor:
    """Return the original tiles bfloat16 [T, S, 16, 2]."""
    library = build.library()
    if library is None:
        return decompress_portably(memory, num_tiles, num_steps)
    tiles = torch.empty(num_tiles, num_steps, 16, 2, dtype=torch.bfloat16)
    library.decompress(memory.data_ptr(), num_tiles, num_steps, tiles.data_ptr())
    return tiles


def decompress_portably(memory: Tensor, num_tiles: int, num_steps: int) -> Tensor:
    groups, _, exceptions = _parts(memory, num_tiles, num_steps)
    lower, codes = groups[..., :128].unflatten(-1, (2, 64)), groups[..., None, 128:]  # [T, G, 2, 64], [T, G, 1, 64]
    codes = torch.cat((codes & 15, codes >> 4), dim=2)
    numbers = lower.int() | memory[codes.int()].int() << 8
    numbers = numbers.unflatten(-1, (4, 2, 8)).transpose(3, 4).reshape(num_tiles, -1)  # in the order of steps
    is_end = exceptions[:, 0] == NOWHERE
    tile = is_end.cumsum(0) - is_end.int()  # each tile has one end marker
    numbers[tile[~is_end], exceptions[~is_end, 0].long()] = exceptions[~is_end, 1]
    tiles: Tensor = numbers[:, : num_steps * STEP].short().view(torch.bfloat16)
    return tiles.view(num_tiles, num_steps, 16, 2)


def check_size(memory: Tensor, num_tiles: int, num_steps: int) -> None:
    """Raise ValueError if a compressed weight with this many tiles and steps cannot have this size."""
    least = _fixed_bytes(num_tiles, num_steps) + 8 * num_tiles
    if memory.ndim != 1 or len(memory) < least or (len(memory) - least) % 8 or not memory.is_contiguous():
        raise ValueError(
            f"compressed weights of {least} bytes, and 8 for each exception, cannot be {list(memory.shape)}"
        )


def check_exceptions(memory: Tensor, num_tiles: int, num_steps: int) -> None:
    """Raise ValueError if a kernel would read past the last exception."""
    _, starts, exceptions = _parts(memory, num_tiles, num_steps)
    if int(starts.min()) < 0 or int(starts.max()) >= len(exceptions) or int(exceptions[-1, 0]) != NOWHERE:
        raise ValueError("compressed weights whose exceptions have no end")


def _fixed_bytes(num_tiles: int, num_steps: int) -> int:
    return HEADER_BYTES + num_tiles * (-(-num_steps * STEP // GROUP) * GROUP_BYTES + 4)


def _parts(memory: Tensor, num_tiles: int, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return groups uint8 [T, G, 192], starts int32 [T] and exceptions int32 [X, 2]."""
    end = _fixed_bytes(num_tiles, num_steps)
    groups = memory[HEADER_BYTES : end - 4 * num_tiles].view(num_tiles, -1, GROUP_BYTES)
    numbers = memory[end - 4 * num_tiles :].view(torch.int32)
    return groups, numbers[:num_tiles], numbers[num_tiles:].view(-1, 2)


def _library() -> build.Library:
    library = build.library()
    assert library is not None
    return library
