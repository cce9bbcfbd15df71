"""The gated delta rule of recurrent layers. One program computes some columns of one head of one sequence, token by
token. Whole chunks of prompts are computed by chunks.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_delta.chunks import gated_delta_chunks, invert_chunks
from kernels.state_panels.triton import CHUNK, CHUNK_ROWS, NO_CHUNKS, chunk_size, first_panel, new_panels, softplus

INVERTING = 16
"""The programs that share the chunks of a head of a sequence. One long prompt and 16 heads occupy a GPU."""


def gated_delta(
    qkv: Tensor,
    decay: Tensor,
    write_gate: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    group: int,
    value_channels: int,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """Compute the same as kernels/gated_delta/reference.py."""
    qkv, decay, write_gate = qkv.contiguous(), decay.contiguous(), write_gate.contiguous()
    inputs, of_heads, rows = (qkv, decay, write_gate), (decay_log, decay_bias), (query_starts, context_lengths, ends)
    _, num_heads, num_panels, key_channels, columns = states.shape
    out = torch.zeros(qkv.shape[0], num_heads * value_channels, dtype=qkv.dtype, device=qkv.device)
    if len(reads):
        num_keys, by_row = (qkv.shape[1] - out.shape[1]) // (2 * key_channels), len(decay_bias) > num_heads
        shape, size = (num_keys, value_channels, key_channels, group), triton.next_power_of_2(key_channels)
        grid = len(reads), num_heads, num_panels
        chunk = NO_CHUNKS if by_row else chunk_size(len(qkv), len(reads))
        panels = new_panels(states, len(qkv), len(reads)) if chunk == CHUNK else states
        arguments = (*inputs, *of_heads, states, panels, *rows, reads, writes, out, *shape, chunk)
        sizes = {"SIZE": size, "COLUMNS": columns, "BY_ROW": by_row}
        _gated_delta[grid](*arguments, 0, **sizes)
        if chunk == CHUNK:
            inverses = torch.empty(len(qkv), num_heads, CHUNK, device=qkv.device)
            sizes_of_chunks = {"CHUNK": CHUNK, "ROWS": CHUNK_ROWS}
            invert_chunks[len(reads), num_heads, INVERTING](
                *inputs, *of_heads, *rows, inverses, *shape, **sizes_of_chunks
            )
            gated_delta_chunks[grid](
                *(qkv, decay, *of_heads, inverses, panels, *rows, out, *shape),
                COLUMNS=columns,
                **sizes_of_chunks,
            )
            _gated_delta[grid](*arguments, 1, **sizes)
    return out


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit(do_not_specialize=["is_rest"])
def _gated_delta(
    qkv,
    decay,
    write_gate,
    decay_log,
    decay_bias,
    states,
    panels,
    query_starts,
    context_lengths,
    ends,
    reads,
    writes,
    out,
    num_key_heads,
    value_channels,
    key_channels,
    group,
    chunk,
    is_rest,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    row, value = tl.arange(0, SIZE), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = row < key_channels, value < value_channels
    of_sequence = (query_starts, context_lengths, ends, reads, writes)
    first, end, matrix, last, stored, is_stored = first_panel(
        states, panels, *of_sequence, key_channels, chunk, is_rest, SIZE, COLUMNS
    )
    rate = tl.exp(tl.load(decay_log + head))
    # decays [rows, 1] or [1, 1] of the head, and their number for a token
    decays, is_decay = (head * key_channels + row)[:, None], in_rows[:, None]
    num_decays = num_heads * key_channels
    if not BY_ROW:
        decays, is_decay, num_decays = tl.full([1, 1], head, tl.int64), tl.full([1, 1], True, tl.int1), num_heads
    bias = tl.load(decay_bias + decays, mask=is_decay, other=0.0)
    key, key_size = head // group % num_key_heads * key_channels + row, num_key_heads * key_channels
    width = 2 * key_size + num_heads * value_channels
    scale = 1.0 / tl.sqrt(key_channels.to(tl.float32))
    for t in range(first, end):
        token = qkv + t * width
        q = _unit(tl.load(token + key, mask=in_rows, other=0.0).to(tl.float32))
        k = _unit(tl.load(token + key_size + key, mask=in_rows, other=0.0).to(tl.float32))
        at = 2 * key_size + head * value_channels + value
        v = tl.load(token + at, mask=in_columns, other=0.0).to(tl.float32)
        step = tl.load(decay + t * num_decays + decays, mask=is_decay, other=0.0).to(tl.float32) + bias
        beta = 1.0 / (1.0 + tl.exp(-tl.load(write_gate + t * num_heads + head).to(tl.float32)))
        matrix *= tl.exp(-rate * softplus(step))
        delta = beta * (v - tl.sum(k[:, None] * matrix, 0))
        matrix += k[:, None] * delta
        y = tl.sum(q[:, None] * matrix, 0) * scale
        tl.store(out + (t * num_heads + head) * value_channels + value, y.to(out.dtype.element_ty), mask=in_columns)
        if t == last:
            tl.store(stored, matrix, mask=is_stored)
