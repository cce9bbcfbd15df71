"""Parts of the kernels of recurrent layers. Program (s, h, p) computes panel p of head h of sequence s."""

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32
"""The most tokens of a chunk. A sequence with fewer tokens in a step is computed token by token. 64 tokens need more
registers than a program has."""
CHUNK_ROWS = 16
"""The rows of a panel that one product reads, for the same reason."""
NO_CHUNKS = 2**30
"""More tokens than a sequence has."""


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def panel_of_slot(states, slot, num_rows, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the addresses [SIZE, COLUMNS] of the program's panel."""
    head, panel = tl.program_id(1), tl.program_id(2)
    number = (slot * tl.num_programs(1) + head) * tl.num_programs(2) + panel
    return states + number * num_rows * COLUMNS + tl.arange(0, SIZE)[:, None] * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def first_panel(states, reads, writes, ends, start, end, num_rows, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the panel [SIZE, COLUMNS] that the first token reads, the addresses where the panel after the last kept
    token is stored, and a mask of these addresses. Stores it if no token is kept."""
    sequence = tl.program_id(0)
    read, write = tl.load(reads + sequence), tl.load(writes + sequence)
    in_rows = (tl.arange(0, SIZE) < num_rows)[:, None]
    is_read = in_rows & (tl.full([SIZE, COLUMNS], read, tl.int64) >= 0)
    is_stored = in_rows & (tl.full([SIZE, COLUMNS], write, tl.int64) >= 0)
    matrix = tl.load(panel_of_slot(states, read, num_rows, SIZE, COLUMNS), mask=is_read, other=0.0)
    stored = panel_of_slot(states, write, num_rows, SIZE, COLUMNS)
    if (start < end) & (tl.load(ends + sequence) <= start):
        tl.store(stored, matrix, mask=is_stored)
    return matrix, stored, is_stored


def chunks_from(num_tokens: int, num_sequences: int) -> int:
    """Return from how many tokens on a sequence is computed in chunks, without a look at the lengths on the device.

    The first chunk begins with the sequence's first token in the step. Borders at absolute positions would keep no more
    bits: a cut elsewhere rounds the state in either case. A sequence's own length decides its form, because each has a
    token; only padding of a captured step has none, and there all others have one.
    """
    return CHUNK if num_tokens - num_sequences + 1 >= CHUNK else NO_CHUNKS


def new_panels(states: Tensor, num_tokens: int, num_sequences: int) -> Tensor:
    """Return memory for the states of all sequences that are computed in chunks."""
    return states.new_empty(min(num_sequences, num_tokens // CHUNK), *states.shape[1:])


@triton.jit
def first_panel_of_chunks(
    panels,
    states,
    reads,
    writes,
    ends,
    start,
    end,
    num_rows,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy the panel that the first token reads to `panels`, from where products read ROWS rows at a time. Return the
    addresses [ROWS, COLUMNS] of the first rows. Stores the panel, as `first_panel` does, if no token is kept."""
    matrix, _, _ = first_panel(states, reads, writes, ends, start, end, num_rows, SIZE, COLUMNS)
    # Both counts grow from one such sequence to the next, because each has CHUNK tokens or more.
    place = tl.minimum(tl.program_id(0), start // CHUNK)
    in_rows = (tl.arange(0, SIZE) < num_rows)[:, None]
    tl.store(panel_of_slot(panels, place, num_rows, SIZE, COLUMNS), matrix, mask=in_rows)
    tl.debug_barrier()  # other threads of the program read it
    return panel_of_slot(panels, place, num_rows, ROWS, COLUMNS)


@triton.jit
def chunk_end(t, kept, end, SIZE: tl.constexpr):
    """Return the end of the chunk that begins at token t. A chunk also ends after the last kept token."""
    return tl.minimum(t + SIZE, tl.where(t < kept, kept, end))


@triton.jit
def decays_of_chunk(log, SIZE: tl.constexpr):
    """Return products of the decays exp(log [SIZE]), where log is zero behind the chunk's end: of the tokens to i, of those
    after j, [i, j] of those after j to i (zero if j is later), and of all. Each is a sum of its own logarithms: a
    difference of sums from the chunk's start would lose digits after a strong decay."""
    i = tl.arange(0, SIZE)
    after = tl.where(i[:, None] > i, log[:, None], 0.0)
    between = tl.where(i[:, None] >= i, tl.exp(tl.cumsum(after, 0)), 0.0)
    return tl.exp(tl.cumsum(log, 0)), tl.exp(tl.sum(after, 0)), between, tl.exp(tl.sum(log, 0))


@triton.jit
def product(a, b):
    """Return the product of float32 matrices. Matrix units have no float32. Three products of TF32 parts have a smaller
    error than the float32 sum itself; one product has a thousand times that error, and states would keep it."""
    return tl.dot(a, b, input_precision="tf32x3")
