"""Prompts of the gated delta rule in chunks (arXiv 2412.06464, section 3.3). The updates of a chunk depend on each other
by a triangular system. Its inverse is computed for all chunks at once; then one program computes some columns of one
head of one sequence, chunk by chunk. The tokens before and after whole chunks are computed one by one."""

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
def _log_of_decays(decay, decay_log, decay_bias, token):
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    step = tl.load(decay + token * num_heads + head).to(tl.float32)
    return -tl.exp(tl.load(decay_log + head)) * softplus(step + tl.load(decay_bias + head))


@triton.jit
def invert_chunks(
    qkv,
    decay,
    write_gate,
    decay_log,
    decay_bias,
    query_starts,
    context_lengths,
    ends,
    inverses,
    num_key_heads,
    value_channels,
    key_channels,
    group,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store (I + L)^-1 diag(beta) of each chunk in `inverses` [T, H, CHUNK], where L[i, j] of j < i is beta_i k_i^T k_j
    times the decays between. By substitution: powers of L are large where keys are equal, as of a repeated token."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    _start, first_row, stop, _end = rows_of_sequence(query_starts, context_lengths, ends, CHUNK)
    i, row, t = tl.arange(0, CHUNK), tl.arange(0, ROWS), first_row + tl.program_id(2) * CHUNK
    key_size = num_key_heads * key_channels
    key, width = key_size + head // group % num_key_heads * key_channels, 2 * key_size + num_heads * value_channels
    while t < stop:
        token = t + i
        squares, scores = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        for first in range(0, key_channels, ROWS):
            in_keys = (first + row < key_channels)[None, :]
            k = tl.load(qkv + token[:, None] * width + key + first + row, mask=in_keys, other=0.0).to(tl.float32)
            squares, scores = squares + tl.sum(k * k, 1), scores + product(k, tl.trans(k))
        _, _, between, _ = decays_of_chunk(_log_of_decays(decay, decay_log, decay_bias, token), CHUNK)
        gate = tl.load(write_gate + token * num_heads + head).to(tl.float32)
        unit, beta = tl.rsqrt(squares + 1e-6), 1.0 / (1.0 + tl.exp(-gate))
        scores *= between * (beta * unit)[:, None] * unit
        lower = tl.trans(tl.where(i[:, None] > i, scores, 0.0))
        inverse = tl.where(i[:, None] == i, 1.0, 0.0)
        for later in range(1, CHUNK):
            of_row = tl.sum(tl.where(i == later, lower, 0.0), 1)
            inverse -= tl.where(i[:, None] == later, tl.sum(of_row[:, None] * inverse, 0), 0.0)
        tl.store(inverses + (token[:, None] * num_heads + head) * CHUNK + i, inverse * beta)
        t += tl.num_programs(2) * CHUNK


@triton.jit
def gated_delta_chunks(
    qkv,
    decay,
    decay_log,
    decay_bias,
    inverses,
    panels,
    query_starts,
    context_lengths,
    ends,
    out,
    num_key_heads,
    value_channels,
    key_channels,
    group,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    start, t, stop, _ = rows_of_sequence(query_starts, context_lengths, ends, CHUNK)
    if t == stop:
        return
    panel, row = panel_of_slot(panels, place_in_panels(start, CHUNK), key_channels, ROWS, COLUMNS), tl.arange(0, ROWS)
    i, value = tl.arange(0, CHUNK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key, key_size = head // group % num_key_heads * key_channels, num_key_heads * key_channels
    width, scale = 2 * key_size + num_heads * value_channels, 1.0 / tl.sqrt(key_channels.to(tl.float32))
    while t < stop:
        token = t + i
        inputs = qkv + token[:, None] * width
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        q_squares, k_squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        q_matrix, k_matrix = tl.zeros([CHUNK, COLUMNS], tl.float32), tl.zeros([CHUNK, COLUMNS], tl.float32)
        for first in range(0, key_channels, ROWS):
            in_rows = first + row < key_channels
            matrix = tl.load(panel + first * COLUMNS, mask=in_rows[:, None], other=0.0)
            in_keys, queries = in_rows[None, :], inputs + key + first + row
            q = tl.load(queries, mask=in_keys, other=0.0).to(tl.float32)
            k = tl.load(queries + key_size, mask=in_keys, other=0.0).to(tl.float32)
            q_squares, k_squares = q_squares + tl.sum(q * q, 1), k_squares + tl.sum(k * k, 1)
            q_matrix, k_matrix = q_matrix + product(q, matrix), k_matrix + product(k, matrix)
            scores += product(q, tl.trans(k))
        log = _log_of_decays(decay, decay_log, decay_bias, token)
        to, after, between, decay_of_all = decays_of_chunk(log, CHUNK)
        q_unit, k_unit = tl.rsqrt(q_squares + 1e-6) * scale, tl.rsqrt(k_squares + 1e-6)
        is_output, of_head = (value < value_channels)[None, :], head * value_channels + value
        v = tl.load(inputs + 2 * key_size + of_head, mask=is_output, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + (token[:, None] * num_heads + head) * CHUNK + i)
        delta = k_unit[:, None] * product(inverse, v - (to * k_unit)[:, None] * k_matrix)
        y = q_unit[:, None] * (to[:, None] * q_matrix + product(scores * between, delta))
        tl.store(
            out + token[:, None] * num_heads * value_channels + of_head, y.to(out.dtype.element_ty), mask=is_output
        )
        delta *= after[:, None]
        tl.debug_barrier()  # all threads have read the panel
        for first in range(0, key_channels, ROWS):
            in_rows = first + row < key_channels
            keys = inputs + key_size + key + first + row
            k = tl.load(keys, mask=in_rows[None, :], other=0.0).to(tl.float32)
            matrix = decay_of_all * tl.load(panel + first * COLUMNS, mask=in_rows[:, None], other=0.0)
            matrix += product(tl.trans(k), delta)
            tl.store(panel + first * COLUMNS, matrix, mask=in_rows[:, None])
        tl.debug_barrier()
        t += CHUNK
