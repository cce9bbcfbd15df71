"""The gated causal convolution of recurrent layers. One program computes a block of channels of one sequence, token by
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
            projected, weight, bias, states, query_starts, reads, writes, ends, out, channels, TAPS=num_taps, SIZE=SIZE
        )
    return out


@triton.jit
def _product(projected, old_states, token, start, read, channels, mask):
    """Return b * x of a token [SIZE]; from the states if the token is before `start`."""
    is_new = tl.full(mask.shape, token, tl.int64) >= start
    row, is_old = projected + token * 3 * channels, (is_new == 0) & (tl.full(mask.shape, read, tl.int64) >= 0)
    b = tl.load(row, mask=mask & is_new, other=0.0)
    x = tl.load(row + 2 * channels, mask=mask & is_new, other=0.0)
    product = (b.to(tl.float32) * x.to(tl.float32)).to(b.dtype)
    return tl.where(is_new, product, tl.load(old_states + token * channels, mask=mask & is_old, other=0.0))


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
            product = _product(projected, old_states, t - before + j, start, read, channels, mask).to(tl.float32)
            total += tl.load(weight + j * channels + channel, mask=mask, other=0.0).to(tl.float32) * product
        c = tl.load(projected + (t * 3 + 1) * channels, mask=mask, other=0.0).to(tl.float32)
        y = c * total.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + t * channels + channel, y.to(out.dtype.element_ty), mask=mask)
    if (write >= 0) & (start < end):
        kept = tl.load(ends + sequence)
        for k in tl.static_range(before):  # oldest first: the slot that is written may be the one that is read
            product = _product(projected, old_states, kept - before + k, start, read, channels, mask)
            tl.store(states + (write * before + k) * channels + channel, product, mask=mask)
