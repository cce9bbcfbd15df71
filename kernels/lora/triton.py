"""Two launches: A x into float32, then y += scale * B (A x). Rows are sorted by slot, and a program processes rows of
one adapter, so that a factor is read once for all of them. Grids depend only on T and the table; there is no
synchronisation with the GPU.

T rows, I inputs, O outputs, N slots, R the largest rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora.table import AdapterTable
from kernels.moe.triton import _sort
from kernels.paged_attention.triton import find_segment

ROWS = 16  # rows of one adapter per program: the smallest number for a matrix unit
RANKS = tl.constexpr(16)  # ranks at a time; independent of the table's largest rank, so that sums do not depend on it
INPUTS, OUTPUTS = 128, 64
SORTED_AT_ONCE = 1024


def lora_add(y: Tensor, x: Tensor, table: AdapterTable, slots: Tensor) -> None:
    """Compute the same as kernels/lora/reference.py. The bits of a row do not depend on other rows, their ranks or its
    slot."""
    num_rows, num_slots = len(x), table.num_slots
    if not num_rows:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    order = torch.empty(num_rows, dtype=torch.int32, device=x.device)
    starts = torch.empty(num_slots + 1, dtype=torch.int32, device=x.device)
    _sort[(num_slots + 1,)](slots.contiguous(), order, starts, num_rows, SIZE=SORTED_AT_ONCE)
    parts = triton.cdiv(table.max_rank, RANKS.value)
    hidden = torch.empty(num_rows, parts * RANKS.value, device=x.device)
    blocks = num_rows // ROWS + num_slots  # upper bound: each adapter rounds up
    shared = {"num_slots": num_slots, "max_rank": table.max_rank, "ROWS": ROWS}
    _shrink[(blocks, parts)](
        x, table.a, table.ranks, order, starts, hidden, x.stride(0), inputs=x.shape[1], INPUTS=INPUTS, **shared
    )
    _expand[(blocks, triton.cdiv(y.shape[1], OUTPUTS))](
        hidden,
        table.b,
        table.ranks,
        table.scales,
        order,
        starts,
        y,
        y.stride(0),
        outputs=y.shape[1],
        OUTPUTS=OUTPUTS,
        **shared,
    )


@triton.jit
def _rows_of(order, starts, num_slots, ROWS: tl.constexpr):
    """Return the slot of this program's block, its rows, and the mask of valid rows. Rows without an adapter precede
    all slots."""
    block = tl.program_id(0)
    slot = find_segment(starts, num_slots, block, ROWS)
    start, end = tl.load(starts + slot), tl.load(starts + slot + 1)
    place = start + (block - (start // ROWS + slot)) * ROWS + tl.arange(0, ROWS)
    inside = (place >= start) & (place < end)
    return slot.to(tl.int64), tl.load(order + place, mask=inside, other=0).to(tl.int64), inside


@triton.jit
def _shrink(
    x,
    a,
    ranks,
    order,
    starts,
    hidden,
    x_stride,
    num_slots,
    max_rank: tl.constexpr,
    inputs: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute RANKS elements of A x for rows of one adapter. Elements beyond its rank are 0."""
    slot, row, inside = _rows_of(order, starts, num_slots, ROWS)
    first = tl.program_id(1) * RANKS
    rank = tl.load(ranks + slot)
    if (tl.max(inside.to(tl.int32), 0) == 0) | (first >= rank):
        return
    r = first + tl.arange(0, RANKS)
    total = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(0, inputs, INPUTS):
        i = start + tl.arange(0, INPUTS)
        known = i < inputs
        part = tl.load(x + row[:, None] * x_stride + i[None, :], mask=inside[:, None] & known[None, :], other=0.0)
        factors = tl.load(
            a + (slot * max_rank + r[None, :]) * inputs + i[:, None],
            mask=(r < rank)[None, :] & known[:, None],
            other=0.0,
        )
        total = tl.dot(part, factors, total, input_precision="ieee")
    width: tl.constexpr = (max_rank + RANKS - 1) // RANKS * RANKS
    tl.store(hidden + row[:, None] * width + r[None, :], total, mask=inside[:, None])


@triton.jit
def _expand(
    hidden,
    b,
    ranks,
    scales,
    order,
    starts,
    y,
    y_stride,
    num_slots,
    max_rank: tl.constexpr,
    outputs: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    slot, row, inside = _rows_of(order, starts, num_slots, ROWS)
    rank = tl.load(ranks + slot)
    if (tl.max(inside.to(tl.int32), 0) == 0) | (rank == 0):
        return
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    width: tl.constexpr = (max_rank + RANKS - 1) // RANKS * RANKS
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, rank, RANKS):
        r = first + tl.arange(0, RANKS)
        part = tl.load(hidden + row[:, None] * width + r[None, :], mask=inside[:, None], other=0.0)
        factors = tl.load(
            b + (slot * max_rank + r[:, None]) * outputs + o[None, :],
            mask=(r < rank)[:, None] & (o < outputs)[None, :],
            other=0.0,
        )
        total = tl.dot(part, factors.to(tl.float32), total, input_precision="ieee")
    place = y + row[:, None] * y_stride + o[None, :]
    mask = inside[:, None] & (o < outputs)[None, :]
    before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (before + tl.load(scales + slot) * total).to(y.dtype.element_ty), mask=mask)
