"""Attention over the paged cache on a GPU: one kernel for prefill and decode, and one that combines the splits of long
sequences.

T new tokens of S sequences, M blocks in the longest block table, N blocks of B slots, H query heads in G groups, D
channels per key head, E per value head. A tile of the kernel has R rows, each one query of one head, and L positions.

A program processes the queries of some tokens in the heads of one group, so that a key is read once for all of them and
the product has enough rows for matrix units (arXiv 2511.11581). If this gives too few programs to fill a GPU, the
positions are split, and `_join` combines the partial results (arXiv 2311.01282). The grid depends only on T, S and M,
never on lengths: a CUDA graph may hold the launch, and there is no synchronisation with the GPU.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_format import INT8_NAN, PagedVectors

FULL_GPU = 264  # programs that keep an H200 busy: two per multiprocessor (132)
SPLIT_POSITIONS = 256  # combining a shorter split costs more than it saves
MAX_SPLITS = 64
NAN_CODE = tl.constexpr(INT8_NAN)
LOG2_E = tl.constexpr(1.4426950408889634)  # to use powers of 2, which take one instruction
# They vary from step to step. Triton must not recompile when one is 1 or divisible by 16.
COUNTS = ("num_tokens", "num_sequences", "table_stride")


@dataclass(frozen=True)
class Launch:
    """The sizes of a launch: R rows and L positions of a tile."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int


def paged_attention(
    query: Tensor,
    key_cache: PagedVectors,
    value_cache: PagedVectors,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute the same as kernels/paged_attention/reference.py, with the softmax and all sums in float32.

    Rows of `query` from query_starts[S] on are padding, and so are sequences without new tokens: their results are not
    written.
    """
    query, block_tables = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, block_tables))
    (num_tokens, num_heads, _), (num_sequences, table_width) = query.shape, block_tables.shape
    shapes = _shapes(query, key_cache, value_cache)
    heads, groups, value_channels = shapes["heads"], shapes["groups"], shapes["value_channels"]
    output = query.new_empty(num_tokens, num_heads, value_channels)
    if not num_tokens:
        return output
    launch = choose_launch(num_tokens, num_sequences, heads, max(shapes["key_channels"], value_channels), query.dtype)
    head_block = min(heads, launch.rows)
    token_block = launch.rows // head_block
    token_blocks = num_tokens // token_block + num_sequences  # upper bound: each sequence rounds up
    head_blocks = groups * triton.cdiv(heads, head_block)
    splits = num_splits(token_blocks * head_blocks, table_width * shapes["block_size"])
    parts, sums = output, None
    if splits > 1:
        parts = torch.empty(splits, num_tokens, num_heads, value_channels, device=query.device)
        sums = torch.empty(splits, num_tokens, num_heads, device=query.device)
    caches = (*_storage(key_cache), *_storage(value_cache))
    vectors = (query_starts, context_lengths, alibi_slopes, prefix_lengths, sinks)
    where = (block_tables, *(None if vector is None else vector.contiguous() for vector in vectors))
    numbers = (scale, query.stride(0), query.stride(1), block_tables.stride(0), num_tokens, num_sequences)
    tiles = {"ROWS": launch.rows, "TOKENS": token_block, "HEADS": head_block, "POSITIONS": launch.positions}
    kind = {"soft_cap": soft_cap, "window": window, "chunk": chunk, "SPLITS": splits}
    warps = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    grid = (token_blocks, head_blocks, splits)
    _attend[grid](query, *caches, *where, parts, sums, *numbers, **shapes, **tiles, **kind, **warps)
    if splits > 1:
        counts = (num_tokens, num_sequences, num_heads, value_channels, splits, triton.next_power_of_2(value_channels))
        _join[(num_tokens, num_heads)](parts, sums, where[1], where[-1], output, *counts, num_warps=4)
    return output


def choose_launch(num_tokens: int, num_sequences: int, heads: int, channels: int, dtype: torch.dtype) -> Launch:
    """Return the launch for `heads` query heads that share a key. Prefill has many rows per key, decode has few. Wide
    heads and float32 leave shared memory for fewer positions. Matrix units of Hopper take at least 64 rows."""
    rows_per_key = heads * triton.cdiv(num_tokens, num_sequences)
    if dtype.itemsize == 4:
        return Launch(16 if rows_per_key <= 16 else 32, 32 if channels <= 256 else 16, 8, 2)
    if channels > 256:
        return Launch(16, 32, 4, 2) if rows_per_key <= 16 else Launch(64, 16, 8, 2)
    if rows_per_key <= 16:
        return Launch(16, 64 if channels <= 128 else 32, 4, 3)
    if rows_per_key <= 64:
        return Launch(64, 64 if channels <= 128 else 32, 4, 2)
    return Launch(128, 64, 8, 3) if channels <= 128 else Launch(128, 32, 8, 2)


def num_splits(programs: int, longest: int) -> int:
    """Return the number of splits of a sequence, a power of 2: enough to fill a GPU, but none shorter than
    SPLIT_POSITIONS for the `longest` possible sequence."""
    num_needed = min(triton.cdiv(FULL_GPU, programs), triton.cdiv(longest, SPLIT_POSITIONS), MAX_SPLITS)
    return int(triton.next_power_of_2(num_needed))


def _storage(cache: PagedVectors) -> tuple[Tensor, Tensor | None]:
    """Return codes (or unquantised vectors) and their scales (or int4 ranges)."""
    # the kernel computes addresses from the slot number alone
    assert all(part.is_contiguous() for part in cache.tensors)
    return cache.tensors[0], cache.scales


def _group_size(cache: PagedVectors) -> int:
    """Return the channels that share a range in an int4 cache; 0 for other formats."""
    codes, scales = cache.tensors[0], cache.scales
    return 2 * codes.shape[-1] // scales.shape[-2] if scales is not None and codes.dtype == torch.uint8 else 0


def _shapes(query: Tensor, key_cache: PagedVectors, value_cache: PagedVectors) -> dict[str, int]:
    """Return the sizes that all launches of a layer share.

    Keys are read in two parts whose widths are powers of 2: 80 channels as 64 + 16, 576 as 512 + 64.
    """
    block_size, groups = key_cache.tensors[0].shape[1:3]
    channels = query.shape[-1]
    main = max(16, triton.next_power_of_2(channels + 1) // 2)
    return {
        "key_channels": channels,
        "value_channels": value_cache.channels,
        "block_size": block_size,
        "groups": groups,
        "heads": query.shape[1] // groups,
        "key_width": key_cache.tensors[0].shape[-1],
        "value_width": value_cache.tensors[0].shape[-1],
        "key_group": _group_size(key_cache),
        "value_group": _group_size(value_cache),
        "key_static": key_cache.has_static_scales,
        "value_static": value_cache.has_static_scales,
        "MAIN": main,
        "REST": 0 if channels <= main else max(16, triton.next_power_of_2(channels - main)),
        "VALUE": max(16, triton.next_power_of_2(value_cache.channels)),
    }


@triton.jit
def find_segment(starts, count, block, BLOCK: tl.constexpr):
    """Return the segment that owns block number `block`. Segment s is [starts[s], starts[s+1]). It owns the blocks from
    starts[s] // BLOCK + s on, enough for its length rounded up to whole blocks. A block after the end of its segment is
    empty."""
    low, high = 0, count  # the last s in [low, high) that begins at or before `block`
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(starts + middle) // BLOCK + middle
        low = tl.where(begins <= block, middle, low)
        high = tl.where(begins <= block, high, middle)
    return low


@triton.jit
def _repeat(x, times: tl.constexpr):
    """Repeat each element of x [L, C] along the channels: [L, C * times]."""
    wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], times])
    return tl.reshape(wide, [x.shape[0], x.shape[1] * times])


@triton.jit
def _read(
    codes,
    scales,
    vectors,
    valid,
    channels: tl.constexpr,
    SIZE: tl.constexpr,
    width: tl.constexpr,
    group: tl.constexpr,
    is_static: tl.constexpr,
    dtype: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """Return channels FIRST to FIRST + SIZE - 1 of the vectors with these numbers [L]: [L, SIZE]. They are 0 beyond
    `channels` and where `valid` is false, because memory that was never written may hold NaN."""
    channel = FIRST + tl.arange(0, SIZE)
    mask = valid[:, None] & (channel < channels)[None, :]
    if group > 0:  # int4
        byte = FIRST // 2 + tl.arange(0, SIZE // 2)
        inside = valid[:, None] & (byte < width)[None, :]
        pairs = tl.load(codes + vectors[:, None] * width + byte[None, :], mask=inside, other=0)
        # each range is loaded once, not once per byte
        fits_whole: tl.constexpr = group & (group - 1) == 0 and group <= SIZE
        part = FIRST // group + tl.arange(0, SIZE // group) if fits_whole else 2 * byte // group
        known = valid[:, None] & (part < 2 * width // group)[None, :]
        ranges = scales + (vectors[:, None] * (2 * width // group) + part[None, :]) * 2
        scale = tl.load(ranges, mask=known, other=0).to(tl.float32)
        lowest = tl.load(ranges + 1, mask=known, other=0).to(tl.float32)
        if fits_whole:
            scale, lowest = _repeat(scale, group // 2), _repeat(lowest, group // 2)
        tile = tl.interleave((pairs & 15).to(tl.float32) * scale + lowest, (pairs >> 4).to(tl.float32) * scale + lowest)
        return tl.where(mask, tile, 0.0).to(dtype)
    tile = tl.load(codes + vectors[:, None] * width + channel[None, :], mask=mask, other=0.0)
    if is_static:
        scale = tl.load(scales)
        if codes.dtype.element_ty == tl.int8:
            scale = tl.where(tile == NAN_CODE, float("nan"), scale)
        return (tile.to(tl.float32) * scale).to(dtype)
    if scales is not None:
        return (tile.to(tl.float32) * tl.load(scales + vectors, mask=valid, other=0.0)[:, None]).to(dtype)
    return tile.to(dtype)


@triton.jit
def _tiles(
    first_position,
    seen_end,
    split,
    window: tl.constexpr,
    chunk: tl.constexpr,
    POSITIONS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return the first tile of positions of a split, and the end of its tiles."""
    first, last = 0, tl.cdiv(seen_end, POSITIONS)
    if window is not None:
        first = tl.maximum(first_position - window + 1, 0) // POSITIONS
    if chunk is not None:
        first = first_position // chunk * chunk // POSITIONS
    if SPLITS > 1:
        tiles_per_split = tl.cdiv(last - first, SPLITS)
        first += split * tiles_per_split
        last = tl.minimum(last, first + tiles_per_split)
    return first, last


@triton.jit
def _exponents(
    scores,
    seen,
    valid,
    position,
    prefix,
    slope,
    soft_cap: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
):
    """Return log2 of the weights [R, L], up to a constant per row; -inf where a row does not attend to a position."""
    if soft_cap is not None:
        scores = soft_cap * (1 - 2 / (tl.exp(2 / soft_cap * scores) + 1))  # tanh
    distance = seen[None, :] - position[:, None]
    if slope is not None:
        scores += slope[:, None] * distance
    visible = (distance <= 0) | (seen < prefix)[None, :]
    if window is not None:
        visible &= distance > -window
    if chunk is not None:
        visible &= seen[None, :] >= (position // chunk * chunk)[:, None]
    return tl.where(visible & valid[None, :], scores * LOG2_E, float("-inf"))


@triton.jit
def _with_sink(total, highest, sinks, head, mask, SPLITS: tl.constexpr):
    """Add the sinks' weights [R] to the sums of weights; with several splits, `_join` does."""
    if SPLITS == 1 and sinks is not None:
        total += tl.exp2(tl.load(sinks + head, mask=mask, other=0.0) * LOG2_E - highest)
    return total


@triton.jit(do_not_specialize=COUNTS)
def _attend(
    query,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    block_tables,
    query_starts,
    context_lengths,
    alibi_slopes,
    prefix_lengths,
    sinks,
    output,
    sums,
    scale,
    token_stride,
    head_stride,
    table_stride,
    num_tokens,
    num_sequences,
    key_channels: tl.constexpr,
    value_channels: tl.constexpr,
    soft_cap: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
    block_size: tl.constexpr,
    groups: tl.constexpr,
    heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    key_group: tl.constexpr,
    value_group: tl.constexpr,
    key_static: tl.constexpr,
    value_static: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Compute one block of tokens, the heads of one group (or HEADS of them), and one split of the positions. With
    several splits it writes the split's attention [SPLITS, T, H, E] and log2 of its sum of weights [SPLITS, T, H]; else
    the output [T, H, E]."""
    token_block, head_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head_blocks: tl.constexpr = (heads + HEADS - 1) // HEADS
    group, first_head = head_block // head_blocks, head_block % head_blocks * HEADS
    s = find_segment(query_starts, num_sequences, token_block, TOKENS)
    start, end = tl.load(query_starts + s).to(tl.int32), tl.load(query_starts + s + 1).to(tl.int32)
    first = (token_block - (start // TOKENS + s)) * TOKENS  # index in the sequence's new tokens
    if first >= end - start:
        return
    length = tl.load(context_lengths + s).to(tl.int32)
    row = tl.arange(0, ROWS)
    token, head = first + row // HEADS, group * heads + first_head + row % HEADS
    mask = (row < TOKENS * HEADS) & (token < end - start) & (first_head + row % HEADS < heads)
    position = length - (end - start) + token  # [R]
    query_row = (start + token).to(tl.int64)
    queries = query + query_row[:, None] * token_stride + head[:, None] * head_stride
    channel = tl.arange(0, MAIN)
    q_main = tl.load(queries + channel[None, :], mask=mask[:, None] & (channel < key_channels)[None, :], other=0.0)
    if REST > 0:
        channel = MAIN + tl.arange(0, REST)
        q_rest = tl.load(queries + channel[None, :], mask=mask[:, None] & (channel < key_channels)[None, :], other=0.0)
    slope = None
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head, mask=mask, other=0.0)

    prefix = 0
    if prefix_lengths is not None:
        prefix = tl.load(prefix_lengths + s).to(tl.int32)
    first_position = length - (end - start) + first
    seen_end = tl.minimum(length, tl.maximum(first_position + TOKENS, prefix))
    first_tile, last_tile = _tiles(first_position, seen_end, split, window, chunk, POSITIONS, SPLITS)

    highest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, VALUE], tl.float32)
    if key_static:
        key_scales += group
    if value_static:
        value_scales += group
    table = block_tables + s.to(tl.int64) * table_stride
    for tile in range(first_tile, last_tile):
        seen = tile * POSITIONS + tl.arange(0, POSITIONS)  # [L]
        valid = seen < seen_end
        block = tl.load(table + seen // block_size, mask=valid, other=0).to(tl.int64)
        at = (block * block_size + seen % block_size) * groups + group
        dtype: tl.constexpr = q_main.dtype
        keys = _read(key_codes, key_scales, at, valid, key_channels, MAIN, key_width, key_group, key_static, dtype)
        scores = tl.dot(q_main, tl.trans(keys), input_precision="ieee")  # [R, L]
        if REST > 0:
            keys = _read(
                key_codes, key_scales, at, valid, key_channels, REST, key_width, key_group, key_static, dtype, MAIN
            )
            scores = tl.dot(q_rest, tl.trans(keys), scores, input_precision="ieee")
        scores = _exponents(scores * scale, seen, valid, position, prefix, slope, soft_cap, window, chunk)
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row without visible positions so far
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(highest - base)
        total = total * keep + tl.sum(weights, 1)
        values = _read(
            value_codes, value_scales, at, valid, value_channels, VALUE, value_width, value_group, value_static, dtype
        )
        attended = tl.dot(weights.to(dtype), values, attended * keep[:, None], input_precision="ieee")
        highest = higher

    total = _with_sink(total, highest, sinks, head, mask, SPLITS)
    attended /= tl.where(total == 0, 1.0, total)[:, None]
    channel = tl.arange(0, VALUE)
    place = (split * num_tokens.to(tl.int64) + query_row) * (groups * heads) + head  # [R]
    tl.store(
        output + place[:, None] * value_channels + channel[None, :],
        attended.to(output.dtype.element_ty),
        mask=mask[:, None] & (channel < value_channels)[None, :],
    )
    if SPLITS > 1:
        tl.store(sums + place, highest + tl.log2(total), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def _join(
    parts,
    sums,
    query_starts,
    sinks,
    output,
    num_tokens,
    num_sequences,
    num_heads: tl.constexpr,
    value_channels: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUE: tl.constexpr,
):
    """Combine the splits of one token and head, weighted by their sums of weights."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token >= tl.load(query_starts + num_sequences):
        return
    split, channel = tl.arange(0, SPLITS), tl.arange(0, VALUE)
    place = (split * num_tokens.to(tl.int64) + token) * num_heads + head  # [SPLITS]
    exponent = tl.load(sums + place)
    highest = tl.max(exponent, 0)
    weight = tl.exp2(exponent - highest)
    total = tl.sum(weight, 0)
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - highest)
    mask = channel < value_channels
    tile = tl.load(parts + place[:, None] * value_channels + channel[None, :], mask=mask[None, :], other=0.0)
    result = tl.sum(tile * weight[:, None], 0) / total
    tl.store(
        output + (token * num_heads + head) * value_channels + channel, result.to(output.dtype.element_ty), mask=mask
    )
