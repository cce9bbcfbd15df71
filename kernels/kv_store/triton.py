"""One launch for all new vectors of a step. A program processes one key, one value, or up to eight queries of a token.
It optionally normalises and rotates them, encodes a key or a value in registers as in kernels/kv_format.py, and writes
it to its slot.

T tokens, N blocks of B slots, H query heads, G key/value heads, D channels of a head, C channels per group of an int4
cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_format import FLOAT8_MAX, INT4_MAX, INT8_MAX, INT8_NAN, TINY, PagedVectors

LARGEST_INT8, LARGEST_FLOAT8, LARGEST_INT4 = (tl.constexpr(float(code)) for code in (INT8_MAX, FLOAT8_MAX, INT4_MAX))
NAN_OF_INT8, LEAST_SCALE = tl.constexpr(float(INT8_NAN)), tl.constexpr(TINY)


def kv_store(key: Tensor, value: Tensor, key_cache: PagedVectors, value_cache: PagedVectors, slots: Tensor) -> None:
    """Compute the same as kernels/kv_store/reference.py. A negative slot marks padding and is not written."""
    _launch(key[:, :0], key, value, None, None, None, key_cache, value_cache, slots, False, None, None, 0.0)


def rope_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: PagedVectors,
    value_cache: PagedVectors,
    slots: Tensor,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute the same as kernels/kv_store/reference.py, with slots as in `kv_store`. The rotation is float32, rounded
    once."""
    cos, sin = cos.contiguous(), sin.contiguous()
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(query, key, value, cos, sin, output, key_cache, value_cache, slots, interleaved, query_norm, key_norm, eps)
    return output


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    output: Tensor | None,
    key_cache: PagedVectors,
    value_cache: PagedVectors,
    slots: Tensor,
    interleaved: bool,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    query_norm, key_norm = (None if norm is None else norm.contiguous() for norm in (query_norm, key_norm))
    num_tokens, heads, channels = query.shape
    groups, value_channels = value.shape[1:]
    if not (num_tokens and channels):
        return
    size = triton.next_power_of_2(channels)
    at_once = min(triton.next_power_of_2(max(heads, 1)), max(1024 // size, 1), 8)  # 32 channels per thread
    programs = triton.cdiv(heads, at_once) + (2 * groups if value_channels else groups)
    _store[(num_tokens, programs)](
        query,
        key,
        value,
        cos,
        sin,
        query_norm,
        key_norm,
        output,
        slots.contiguous(),
        eps,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        heads=heads,
        groups=groups,
        channels=channels,
        pairs=0 if cos is None else cos.shape[1],
        interleaved=interleaved,
        value_channels=value_channels,
        HEADS=at_once,
        SIZE=size,
        **_layout("key", key_cache),
        **_layout("value", value_cache),
        num_warps=1,
    )


def _layout(name: str, cache: PagedVectors) -> dict[str, Any]:
    """Return the cache's tensors, and how a program holds a vector: all channels in one row, or one row of bytes per
    int4 group.
    """
    assert all(part.is_contiguous() for part in cache.tensors)
    stored, scales = cache.tensors[0], cache.scales
    rows, columns, group_size = 1, stored.shape[-1], 0
    if scales is not None and scales.ndim == 5:  # [N, B, G, P/C, 2]
        rows, columns, group_size = scales.shape[-2], columns // scales.shape[-2], 2 * columns // scales.shape[-2]
    return {
        f"{name}_codes": stored,
        f"{name}_scales": scales,
        f"{name}_group_size": group_size,
        f"{name}_is_static": cache.has_static_scales,
        f"{name.upper()}_ROWS": triton.next_power_of_2(rows),
        f"{name.upper()}_COLUMNS": triton.next_power_of_2(max(columns, 1)),
    }


@triton.jit
def round_half_even(x):
    """Round float32 to the nearest integer, for |x| below 2^22. At the magnitude of 1.5 * 2^23 float32 has no fraction
    bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def normalised(vectors, channel, mask, norm, inverse):
    x = tl.load(vectors + channel, mask=mask, other=0.0)
    if norm is not None:
        x = (x.to(tl.float32) * inverse).to(x.dtype).to(tl.float32)
        x = (tl.load(norm + channel, mask=mask, other=0.0).to(tl.float32) * x).to(vectors.dtype.element_ty)
    return x


@triton.jit
def turned(
    vectors,
    channel,
    mask,
    norm,
    eps,
    cos,
    sin,
    channels: tl.constexpr,
    pairs: tl.constexpr,
    interleaved: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Return the given channels after norm and rotation, in the vectors' dtype. `vectors` holds the address of each
    row's vector, [R, 1], or one address for all rows."""
    inverse = 1.0
    if norm is not None:
        all_channels = tl.arange(0, SIZE)[None, :]
        vector = tl.load(vectors + all_channels, mask=all_channels < channels, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(vector * vector, 1, keep_dims=True) / channels + eps)
    x = normalised(vectors, channel, mask, norm, inverse)
    if pairs > 0:
        turns = mask & (channel < 2 * pairs)
        if interleaved:
            pair, is_first, step = channel // 2, channel % 2 == 0, 1
        else:
            pair, is_first, step = channel % pairs, channel < pairs, pairs
        partner = normalised(vectors, tl.where(is_first, channel + step, channel - step), turns, norm, inverse)
        c = tl.load(cos + pair, mask=turns, other=0.0).to(tl.float32)
        s = tl.load(sin + pair, mask=turns, other=0.0).to(tl.float32)
        product = partner.to(tl.float32) * s
        rotated = tl.fma(x.to(tl.float32), c, tl.where(is_first, -product, product))
        x = tl.where(turns, rotated.to(x.dtype), x)
    return x


@triton.jit
def store_codes(vector, channel, mask, codes, scales, place, group, channels: tl.constexpr, is_static: tl.constexpr):
    """Store a vector [1, COLUMNS] unquantised, or as codes with their scale."""
    is_int8: tl.constexpr = codes.dtype.element_ty == tl.int8
    largest: tl.constexpr = LARGEST_INT8 if is_int8 else LARGEST_FLOAT8
    if is_static:
        vector = vector.to(tl.float32)
        is_finite = tl.abs(vector) < float("inf")
        vector = tl.clamp(tl.div_rn(vector, tl.load(scales + group)), -largest, largest)
        if is_int8:
            vector = tl.where(is_finite, round_half_even(vector), NAN_OF_INT8)
        else:
            vector = tl.where(is_finite, vector, float("nan"))
    elif scales is not None:
        vector = vector.to(tl.float32)
        # If a value is not finite, its product with 0 is NaN, and so is the scale. `max` alone would hide it.
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(vector)), largest), LEAST_SCALE) + tl.sum(vector * 0.0)
        vector = tl.div_rn(vector, scale)
        if is_int8:
            vector = round_half_even(vector)
        tl.store(scales + place, scale)
    tl.store(codes + place * channels + channel, vector.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def store_int4(low, high, row, column, codes, ranges, place, num_ranges: tl.constexpr, half: tl.constexpr):
    """Store an int4 vector. A row of `low` and `high` [ROWS, COLUMNS] is a group of channels, a column is a byte with
    two codes. Positions beyond a group or beyond the vector repeat the last channel."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    lowest = tl.min(tl.minimum(low, high), 1, keep_dims=True)
    scale = tl.div_rn(tl.max(tl.maximum(low, high), 1, keep_dims=True) - lowest, LARGEST_INT4).to(tl.float16)
    # NaN if a channel is not finite
    lowest = (lowest + tl.sum((low + high) * 0.0, 1, keep_dims=True)).to(tl.float16)
    inside = row < num_ranges
    tl.store(ranges + (place * num_ranges + row) * 2, scale, mask=inside)
    tl.store(ranges + (place * num_ranges + row) * 2 + 1, lowest, mask=inside)
    step, base = tl.maximum(scale.to(tl.float32), LEAST_SCALE), lowest.to(tl.float32)
    low_code = tl.clamp(round_half_even(tl.div_rn(low - base, step)), 0.0, LARGEST_INT4).to(tl.uint8)
    high_code = tl.clamp(round_half_even(tl.div_rn(high - base, step)), 0.0, LARGEST_INT4).to(tl.uint8)
    target = codes + place * (num_ranges * half) + row * half + column
    tl.store(target, low_code | (high_code << 4), mask=inside & (column < half))


@triton.jit
def store_vector(
    vector,
    norm,
    eps,
    cos,
    sin,
    codes,
    scales,
    place,
    group,
    channels: tl.constexpr,
    pairs: tl.constexpr,
    interleaved: tl.constexpr,
    group_size: tl.constexpr,
    is_static: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    if group_size > 0:
        first = row * group_size + tl.minimum(2 * column, group_size - 2)
        even, odd = tl.minimum(first, channels - 1), tl.minimum(first + 1, channels - 1)
        low = turned(vector, even, even >= 0, norm, eps, cos, sin, channels, pairs, interleaved, SIZE)
        high = turned(vector, odd, odd >= 0, norm, eps, cos, sin, channels, pairs, interleaved, SIZE)
        num_ranges: tl.constexpr = (channels + group_size - 1) // group_size
        store_int4(low, high, row, column, codes, scales, place, num_ranges, group_size // 2)
    else:
        mask = column < channels
        x = turned(vector, column, mask, norm, eps, cos, sin, channels, pairs, interleaved, SIZE)
        store_codes(x, column, mask, codes, scales, place, group, channels, is_static)


@triton.jit
def _store(
    query,
    key,
    value,
    cos,
    sin,
    query_norm,
    key_norm,
    output,
    slots,
    eps,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    heads: tl.constexpr,
    groups: tl.constexpr,
    channels: tl.constexpr,
    pairs: tl.constexpr,
    interleaved: tl.constexpr,
    value_channels: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    key_group_size: tl.constexpr,
    key_is_static: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    value_group_size: tl.constexpr,
    value_is_static: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1) - (heads + HEADS - 1) // HEADS
    if pairs > 0:
        cos += token * pairs
        sin += token * pairs
    slot = tl.load(slots + token).to(tl.int64)
    place = slot * groups + group % groups
    if group < 0:
        if heads > 0:
            head, channel = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
            vectors = query + token * query_stride + tl.minimum(head, heads - 1) * query_head_stride
            mask = (head < heads) & (channel < channels)
            x = turned(vectors, channel, mask, query_norm, eps, cos, sin, channels, pairs, interleaved, SIZE)
            tl.store(output + (token * heads + head) * channels + channel, x, mask=mask)
    elif slot >= 0:
        if group < groups:
            vector = key + token * key_stride + group * key_head_stride
            store_vector(
                vector,
                key_norm,
                eps,
                cos,
                sin,
                key_codes,
                key_scales,
                place,
                group,
                channels,
                pairs,
                interleaved,
                key_group_size,
                key_is_static,
                SIZE,
                KEY_ROWS,
                KEY_COLUMNS,
            )
        elif value_channels > 0:
            vector = value + token * value_stride + (group - groups) * value_head_stride
            store_vector(
                vector,
                None,
                eps,
                None,
                None,
                value_codes,
                value_scales,
                place,
                group - groups,
                value_channels,
                0,
                False,
                value_group_size,
                value_is_static,
                SIZE,
                VALUE_ROWS,
                VALUE_COLUMNS,
            )
