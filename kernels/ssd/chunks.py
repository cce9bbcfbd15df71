"""Prompts of Mamba-2's state space layer in chunks (arXiv 2405.21060, section 6). One program computes some columns of
one head of one sequence, chunk by chunk. The tokens before and after whole chunks are computed one by one."""

import triton
import triton.language as tl

from kernels.state_panels.triton import (
    decays_of_chunk,
    panel_of_slot,
    place_in_panels,
    product,
    rows_of_sequence,
    softplus,
)


@triton.jit
def ssd_chunks(
    xbc,
    dt,
    dt_bias,
    decay_log,
    skip,
    out,
    panels,
    query_starts,
    context_lengths,
    ends,
    width,
    channels,
    num_states,
    group,
    min_step,
    max_step,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    start, t, stop, _ = rows_of_sequence(query_starts, context_lengths, ends, CHUNK)
    if t == stop:
        return
    panel, row = panel_of_slot(panels, place_in_panels(start, CHUNK), num_states, ROWS, COLUMNS), tl.arange(0, ROWS)
    rate, bias, factor = tl.exp(tl.load(decay_log + head)), tl.load(dt_bias + head), tl.load(skip + head)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    b_first, c_first = num_heads * channels, (num_heads * channels + width) // 2
    while t < stop:
        token = t + tl.arange(0, CHUNK)
        inputs, of_head = xbc + token[:, None] * width, head * channels + column
        is_output = (column < channels)[None, :]
        step = softplus(tl.load(dt + token * num_heads + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, min_step), max_step)
        x = tl.load(inputs + of_head, mask=is_output, other=0.0).to(tl.float32)
        scores, y = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, COLUMNS], tl.float32)
        for first in range(0, num_states, ROWS):
            state, in_rows = inputs + head // group * num_states + first + row, first + row < num_states
            b = tl.load(state + b_first, mask=in_rows[None, :], other=0.0).to(tl.float32)
            c = tl.load(state + c_first, mask=in_rows[None, :], other=0.0).to(tl.float32)
            matrix = tl.load(panel + first * COLUMNS, mask=in_rows[:, None], other=0.0)
            scores, y = scores + product(c, tl.trans(b)), y + product(c, matrix)
        to, after, between, decay = decays_of_chunk(-rate * step, CHUNK)
        u = step[:, None] * x
        y = to[:, None] * y + product(scores * between, u) + factor * x
        tl.store(out + token[:, None] * num_heads * channels + of_head, y.to(out.dtype.element_ty), mask=is_output)
        tl.debug_barrier()  # all threads have read the panel
        u = after[:, None] * u
        for first in range(0, num_states, ROWS):
            state, in_rows = inputs + head // group * num_states + first + row, first + row < num_states
            b = tl.load(state + b_first, mask=in_rows[None, :], other=0.0).to(tl.float32)
            matrix = decay * tl.load(panel + first * COLUMNS, mask=in_rows[:, None], other=0.0)
            matrix += product(tl.trans(b), u)
            tl.store(panel + first * COLUMNS, matrix, mask=in_rows[:, None])
        tl.debug_barrier()
        t += CHUNK
