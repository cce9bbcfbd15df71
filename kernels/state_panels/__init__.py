"""The states of recurrent layers with a matrix M for each head, in slots of panels.

S sequences, H heads, M of N rows and D columns, P slots.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

COLUMNS = 32
"""The columns of a panel. The last panel of a head is padded."""
MAX_ROWS = 256
"""The most rows that the C++ kernels support."""


def state_shape(num_heads: int, num_rows: int, num_columns: int) -> tuple[int, int, int, int]:
    """Return the shape of one slot's state [H, panels, N, COLUMNS]."""
    return num_heads, -(-num_columns // COLUMNS), num_rows, COLUMNS


def are_supported(states: Tensor, num_columns: int, *slots: Tensor) -> bool:
    """Return whether the C++ kernels support these states. `slots`: query_starts, reads, writes, ends."""
    fit = states.is_cpu and states.dtype == torch.float32 and states.is_contiguous() and 0 < states.shape[3] <= MAX_ROWS
    fit = fit and states.shape[1:] == state_shape(states.shape[1], states.shape[3], num_columns)
    return fit and all(part.is_cpu and part.dtype == torch.int64 for part in slots)


def advance(
    states: Tensor,
    num_columns: int,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
    update: Callable[[int, Tensor], Tensor],
) -> None:
    """Compute all tokens of all sequences in plain PyTorch: M [H, N, D] becomes update(t, M).

    states [P, H, panels, N, COLUMNS] float32: M by panels of COLUMNS columns. query_starts, reads, writes, ends: as of
    `short_conv`. M is zero if reads[s] is -1.
    """
    padding = states.shape[2] * COLUMNS - num_columns
    for s, (read, write, kept) in enumerate(zip(*map(Tensor.tolist, (reads, writes, ends)), strict=True)):
        start, end = query_starts[s : s + 2].tolist()
        m = states[read] if read >= 0 else torch.zeros_like(states[0])
        m = m.transpose(1, 2).flatten(2)[..., :num_columns]
        for t in range(start, end + 1):
            if t == kept and write >= 0 and start < end:
                states[write] = pad(m, (0, padding)).unflatten(2, (-1, COLUMNS)).transpose(1, 2)
            if t < end:
                m = update(t, m)
