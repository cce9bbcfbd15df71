"""Parts of the kernels of recurrent layers. Program (s, h, p) computes panel p of head h of sequence s."""

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32
"""The tokens of a chunk. Chunks begin at multiples of CHUNK in a sequence. A step computes the chunks that it contains
whole as chunks, and its other tokens one by one, so that a cut of a prompt at a multiple of CHUNK changes no bit. 64
tokens need more registers than a program has."""
CHUNK_ROWS = 16
"""The rows of a panel that one product reads, for the same reason."""
NO_CHUNKS = 2**30
"""More tokens than a sequence has."""


def chunk_size(num_tokens: int, num_sequences: int) -> int:
    """Return CHUNK, or NO_CHUNKS if no sequence has as many tokens in the step. Lengths are on the device.

    Each sequence has a token. Only padding of a captured step has none, and there no other sequence has two.
    """
    return CHUNK if num_tokens - num_sequences + 1 >= CHUNK else NO_CHUNKS


def new_panels(states: Tensor, num_tokens: int, num_sequences: int) -> Tensor:
    """Return memory for the states of all sequences with chunks, between the launches of a step."""
    return states.new_empty(min(num_sequences, num_tokens // CHUNK), *states.shape[1:])


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
def rows_of_sequence(query_starts, context_lengths, ends, chunk):
    """Return the first row of the program's sequence, the first row and the end of its whole chunks, and the end of its
    rows. Drafts are in no chunk, because the state before them is kept. Without a chunk all but the first row are the
    end."""
    sequence = tl.program_id(0)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    position = tl.load(context_lengths + sequence) - (end - start)
    first = start + (position + chunk - 1) // chunk * chunk - position
    stop = start + (position + tl.load(ends + sequence) - start) // chunk * chunk - position
    return start, tl.where(first < stop, first, end), tl.where(first < stop, stop, end), end


@triton.jit
def place_in_panels(start, chunk):
    """Return the number of the program's sequence in `panels`, if it has a whole chunk."""
    # Both counts grow from one such sequence to the next, because each has `chunk` tokens or more.
    return tl.minimum(tl.program_id(0), start // chunk)


@triton.jit
def first_panel(
    states,
    panels,
    query_starts,
    context_lengths,
    ends,
    reads,
    writes,
    num_rows,
    chunk,
    is_rest,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the range of the tokens that a program computes one by one, and the panel [SIZE, COLUMNS] that the first
    of them reads. Then follow the token after which the panel is stored, the addresses, and their mask.

    These tokens are after the sequence's whole chunks if `is_rest`, else before them. `panels` has the panel in between.
    Stores the first panel if the token after which it is stored is before the first one.
    """
    sequence = tl.program_id(0)
    first, end, after_chunks, end_of_rest = rows_of_sequence(query_starts, context_lengths, ends, chunk)
    source, read = states, tl.load(reads + sequence)
    target, write, kept = states, tl.load(writes + sequence), tl.load(ends + sequence)
    place, has_chunks, has_tokens = place_in_panels(first, chunk), end < after_chunks, first < end_of_rest
    if is_rest:
        source, read, has_tokens = panels, tl.where(has_chunks, place, -1), has_chunks
        first, end = after_chunks, end_of_rest
    elif has_chunks:
        target, write, kept = panels, place, end
    in_rows = (tl.arange(0, SIZE) < num_rows)[:, None]
    is_read = in_rows & (tl.full([SIZE, COLUMNS], read, tl.int64) >= 0)
    is_stored = in_rows & (tl.full([SIZE, COLUMNS], write, tl.int64) >= 0)
    matrix = tl.load(panel_of_slot(source, read, num_rows, SIZE, COLUMNS), mask=is_read, other=0.0)
    stored = panel_of_slot(target, write, num_rows, SIZE, COLUMNS)
    if has_tokens & (kept <= first):
        tl.store(stored, matrix, mask=is_stored)
    return first, end, matrix, kept - 1, stored, is_stored


@triton.jit
def decays_of_chunk(log, SIZE: tl.constexpr):
    """Return products of the decays exp(log [SIZE]): of the tokens to i, of the tokens after j, [i, j] of the tokens after j
    to i (zero if j is later), and of all. Each is a sum of its own logarithms: a difference of sums from the chunk's
    start would lose digits after a strong decay."""
    i = tl.arange(0, SIZE)
    after = tl.where(i[:, None] > i, log[:, None], 0.0)
    between = tl.where(i[:, None] >= i, tl.exp(tl.cumsum(after, 0)), 0.0)
    return tl.exp(tl.cumsum(log, 0)), tl.exp(tl.sum(after, 0)), between, tl.exp(tl.sum(log, 0))


@triton.jit
def product(a, b):
    """Return the product of float32 matrices. Matrix units have no float32. Three products of TF32 parts have a smaller
    error than the float32 sum itself; one product has a thousand times that error, and states would keep it."""
    return tl.dot(a, b, input_precision="tf32x3")
