"""One program for each new vector, key or value: it is encoded in registers as kernels/kv_format.py says, and written to its slot.

T tokens, N blocks of B slots, G key/value heads, D channels of a head, C of them in a group of an int4 cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_format import FLOAT8_MAX, INT4_MAX, INT8_MAX, INT8_NAN, TINY, PagedVectors


def kv_store(key: Tensor, value: Tensor, key_cache: PagedVectors, value_cache: PagedVectors, slots: Tensor) -> None:
    """As kernels/kv_store/reference.py says; a slot below 0 is padding and is not written."""
    for cache, vectors in ((key_cache, key), (value_cache, value)):
        if vectors.numel():
            _store(cache, vectors if vectors.stride(-1) == 1 else vectors.contiguous(), slots)


def _store(cache: PagedVectors, vectors: Tensor, slots: Tensor) -> None:
    assert all(part.is_contiguous() for part in cache.tensors)
    num_tokens, groups, channels = vectors.shape
    codes, scales = cache.tensors[0], cache.scales
    if scales is not None and scales.ndim == 5:  # [N, B, G, P/C, 2]
        num_ranges = scales.shape[-2]
        size = 2 * codes.shape[-1] // num_ranges
        _store_int4[(num_tokens, groups)](
            vectors,
            codes,
            scales,
            slots,
            vectors.stride(0),
            vectors.stride(1),
            groups=groups,
            channels=channels,
            group=size,
            num_ranges=num_ranges,
            HALF=triton.next_power_of_2(size // 2),
            RANGES=triton.next_power_of_2(num_ranges),
            highest=INT4_MAX,
            tiny=TINY,
            num_warps=1,
        )
        return
    _store_codes[(num_tokens, groups)](
        vectors,
        codes,
        scales,
        slots,
        vectors.stride(0),
        vectors.stride(1),
        groups=groups,
        channels=channels,
        is_static=cache.has_static_scales,
        SIZE=triton.next_power_of_2(channels),
        largest_code=FLOAT8_MAX if codes.dtype.is_floating_point else INT8_MAX,
        int8_nan=INT8_NAN,
        tiny=TINY,
        num_warps=1,
    )


@triton.jit
def round_half_even(x):
    """float32 to the nearest whole number, for |x| below 2^22: beside 1.5 * 2^23 there is no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _store_codes(
    vectors,
    codes,
    scales,
    slots,
    token_stride,
    group_stride,
    groups: tl.constexpr,
    channels: tl.constexpr,
    is_static: tl.constexpr,
    SIZE: tl.constexpr,
    largest_code: tl.constexpr,
    int8_nan: tl.constexpr,
    tiny: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    channel = tl.arange(0, SIZE)
    mask = channel < channels
    vector = tl.load(vectors + token * token_stride + group * group_stride + channel, mask=mask, other=0.0)
    place = slot * groups + group
    if is_static:
        vector = vector.to(tl.float32)
        is_finite = tl.abs(vector) < float("inf")
        vector = tl.clamp(tl.div_rn(vector, tl.load(scales + group)), -largest_code * 1.0, largest_code * 1.0)
        if codes.dtype.element_ty == tl.int8:
            vector = tl.where(is_finite, round_half_even(vector), int8_nan * 1.0)
        else:
            vector = tl.where(is_finite, vector, float("nan"))
    elif scales is not None:
        vector = vector.to(tl.float32)
        # A product with 0 is NaN for what is not finite: `max` would hide it.
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(vector), 0), largest_code * 1.0), tiny) + tl.sum(vector * 0.0, 0)
        vector = tl.div_rn(vector, scale)
        if codes.dtype.element_ty == tl.int8:
            vector = round_half_even(vector)
        tl.store(scales + place, scale)
    tl.store(codes + place * channels + channel, vector.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def _store_int4(
    vectors,
    codes,
    ranges,
    slots,
    token_stride,
    group_stride,
    groups: tl.constexpr,
    channels: tl.constexpr,
    group: tl.constexpr,
    num_ranges: tl.constexpr,
    HALF: tl.constexpr,
    RANGES: tl.constexpr,
    highest: tl.constexpr,
    tiny: tl.constexpr,
):
    """A row of a tile is a group of channels, a column a byte of codes. Beyond a group, and beyond the vector, the last channel stands."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    row, column = tl.arange(0, RANGES), tl.arange(0, HALF)
    first = row[:, None] * group + tl.minimum(2 * column, group - 2)[None, :]  # [P/C, C/2]
    vector = vectors + token * token_stride + head * group_stride
    low = tl.load(vector + tl.minimum(first, channels - 1)).to(tl.float32)
    high = tl.load(vector + tl.minimum(first + 1, channels - 1)).to(tl.float32)
    lowest = tl.min(tl.minimum(low, high), 1)
    scale = tl.div_rn(tl.max(tl.maximum(low, high), 1) - lowest, highest * 1.0).to(tl.float16)
    lowest = (lowest + tl.sum((low + high) * 0.0, 1)).to(tl.float16)  # NaN, if one of the channels is not finite
    place = slot * groups + head
    inside = row < num_ranges
    tl.store(ranges + (place * num_ranges + row) * 2, scale, mask=inside)
    tl.store(ranges + (place * num_ranges + row) * 2 + 1, lowest, mask=inside)
    step, base = tl.maximum(scale.to(tl.float32), tiny)[:, None], lowest.to(tl.float32)[:, None]
    low_code = tl.clamp(round_half_even(tl.div_rn(low - base, step)), 0.0, highest * 1.0).to(tl.uint8)
    high_code = tl.clamp(round_half_even(tl.div_rn(high - base, step)), 0.0, highest * 1.0).to(tl.uint8)
    half: tl.constexpr = group // 2
    target = codes + place * (num_ranges * half) + row[:, None] * half + column[None, :]
    tl.store(target, low_code | (high_code << 4), mask=inside[:, None] & (column < half)[None, :])
