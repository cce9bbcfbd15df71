"""The causal convolution of recurrent layers. One program computes a block of channels of one sequence, token by
token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 128  # channels of a program


def short_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
) -> Tensor:
    """Compute the same as kernels/short_conv/reference.py."""
    projected, weight, (num_taps, channels) = projected.contiguous(), weight.contiguous(), weight.shape
    out = torch.zeros(projected.shape[0], channels, dtype=projected.dtype, device=projected.device)
    if len(reads):
        _short_conv[len(reads), triton.cdiv(channels, SIZE)](
            projected,
            weight,
            bias,
            states,
            query_starts,
            reads,
            writes,
            ends,
            out,
            channels,
            TAPS=num_taps,
            IS_GATED=projected.shape[1] == 3 * channels,
            SIZE=SIZE,
        )
    return out


@triton.jit
def _input(projected, old_states, token, start, read, channels, mask, IS_GATED: tl.constexpr):
    """Return the input of a token [SIZE]; from the states if the token is before `start`."""
    is_new = tl.full(mask.shape, token, tl.int64) >= start
    is_old = (is_new == 0) & (tl.full(mask.shape, read, tl.int64) >= 0)
    if IS_GATED:
        row = projected + token * 3 * channels
        b = tl.load(row, mask=mask & is_new, other=0.0).to(tl.float32)
        x = tl.load(row + 2 * channels, mask=mask & is_new, other=0.0)
        new = (b * x.to(tl.float32)).to(x.dtype)
    else:
        new = tl.load(projected + token * channels, mask=mask & is_new, other=0.0)
    return tl.where(is_new, new, tl.load(old_states + token * channels, mask=mask & is_old, other=0.0))


@triton.jit
def _short_conv(
    projected,
    weight,
    bias,
    states,
    query_starts,
    reads,
    writes,
    ends,
    out,
    channels,
    TAPS: tl.constexpr,
    IS_GATED: tl.constexpr,
    SIZE: tl.constexpr,
):
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask = channel < channels
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    read, write = tl.load(reads + sequence), tl.load(writes + sequence)
    before: tl.constexpr = TAPS - 1
    projected += channel
    old_states = states + (read * before + before - start) * channels + channel  # row t is token t of the step
    for t in range(start, end):
        total = tl.zeros([SIZE], tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
        for j in tl.static_range(TAPS):
            x = _input(projected, old_states, t - before + j, start, read, channels, mask, IS_GATED).to(tl.float32)
            total += tl.load(weight + j * channels + channel, mask=mask, other=0.0).to(tl.float32) * x
        if IS_GATED:
            c = tl.load(projected + (t * 3 + 1) * channels, mask=mask, other=0.0).to(tl.float32)
            y = c * total.to(out.dtype.element_ty).to(tl.float32)
        else:
            y = total / (1 + tl.exp(-total))
        tl.store(out + t * channels + channel, y.to(out.dtype.element_ty), mask=mask)
    if (write >= 0) & (start < end):
        kept = tl.load(ends + sequence)
        for k in tl.static_range(before):  # oldest first: the slot that is written may be the one that is read
            x = _input(projected, old_states, kept - before + k, start, read, channels, mask, IS_GATED)
            tl.store(states + (write * before + k) * channels + channel, x, mask=mask)
