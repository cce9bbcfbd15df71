"""The state space layer of Mamba-2. One program computes some columns of one head of one sequence, token by token. Whole
chunks of prompts are computed by chunks.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ssd.chunks import ssd_chunks
from kernels.state_panels.triton import CHUNK, CHUNK_ROWS, chunk_size, first_panel, new_panels, softplus


def ssd(
    xbc: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    decay_log: Tensor,
    skip: Tensor,
    states: Tensor,
    group: int,
    head_channels: int,
    min_step: float,
    max_step: float,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """Compute the same as kernels/ssd/reference.py."""
    xbc, of_heads, rows = xbc.contiguous(), (dt_bias, decay_log, skip), (query_starts, context_lengths, ends)
    _, num_heads, num_panels, num_states, columns = states.shape
    out = torch.zeros(xbc.shape[0], num_heads * head_channels, dtype=xbc.dtype, device=xbc.device)
    if len(reads):
        shape = (xbc.shape[1], head_channels, num_states, group, min_step, max_step)
        inputs = (xbc, dt.contiguous(), *of_heads, out)
        grid, chunk = (len(reads), num_heads, num_panels), chunk_size(xbc.shape[0], len(reads))
        panels = new_panels(states, xbc.shape[0], len(reads)) if chunk == CHUNK else states
        arguments = (*inputs, states, panels, *rows, reads, writes, *shape, chunk)
        sizes = {"SIZE": triton.next_power_of_2(num_states), "COLUMNS": columns}
        _ssd[grid](*arguments, 0, **sizes)
        if chunk == CHUNK:
            ssd_chunks[grid](*inputs, panels, *rows, *shape, COLUMNS=columns, CHUNK=CHUNK, ROWS=CHUNK_ROWS)
            _ssd[grid](*arguments, 1, **sizes)
    return out


@triton.jit(do_not_specialize=["is_rest"])
def _ssd(
    xbc,
    dt,
    dt_bias,
    decay_log,
    skip,
    out,
    states,
    panels,
    query_starts,
    context_lengths,
    ends,
    reads,
    writes,
    width,
    channels,
    num_states,
    group,
    min_step,
    max_step,
    chunk,
    is_rest,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    row, column = tl.arange(0, SIZE), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = row < num_states, column < channels
    of_sequence = (query_starts, context_lengths, ends, reads, writes)
    first, end, matrix, last, stored, is_stored = first_panel(
        states, panels, *of_sequence, num_states, chunk, is_rest, SIZE, COLUMNS
    )
    rate, bias, factor = tl.exp(tl.load(decay_log + head)), tl.load(dt_bias + head), tl.load(skip + head)
    b_first, c_first = num_heads * channels, (num_heads * channels + width) // 2
    for t in range(first, end):
        token, of_group = xbc + t * width, head // group * num_states + row
        x = tl.load(token + head * channels + column, mask=in_columns, other=0.0).to(tl.float32)
        b = tl.load(token + b_first + of_group, mask=in_rows, other=0.0).to(tl.float32)
        c = tl.load(token + c_first + of_group, mask=in_rows, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt + t * num_heads + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, min_step), max_step)
        matrix = tl.exp(-rate * step) * matrix + b[:, None] * (step * x)
        y = tl.sum(c[:, None] * matrix, 0) + factor * x
        tl.store(out + (t * num_heads + head) * channels + column, y.to(out.dtype.element_ty), mask=in_columns)
        if t == last:
            tl.store(stored, matrix, mask=is_stored)
