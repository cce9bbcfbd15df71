"""Parts of the kernels of recurrent layers. Program (s, h, p) computes panel p of head h of sequence s."""

import triton
import triton.language as tl


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
