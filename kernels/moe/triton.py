"""Routing, and two products for all experts: gate, up and activation in one launch, down in another. Weights are
unquantised or quantised.

Tokens are sorted by expert, and a program processes tokens of one expert, so that experts without tokens are not read
(arXiv 2211.15841). A single token needs no sorting: each of its experts has one row, whose products are sums in
registers. Grids depend only on T; there is no synchronisation with the GPU.

T tokens, E hidden channels, F channels of an expert, N experts, K experts of each token; P = T * K pairs of token and
expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import Launch, tuned_launch
from kernels.linear.gpu_weight import GPUWeight
from kernels.linear.triton import chunks_at_once, format_of, multiply_row, multiply_rows, tensors_of
from kernels.paged_attention.triton import find_segment
from kernels.quantize_rows.rows import ActivationFormat
from kernels.quantize_rows.triton import quantize_rows
from kernels.swiglu.triton import silu

SORTED_AT_ONCE = 1024

ONE_TOKEN = Launch(16, 1, 4, 3)
LAUNCHES = {16: Launch(64, 16, 4, 4), 64: Launch(64, 64, 4, 3)}
"""The default launches, by the largest average number of pairs per expert. More pairs use LARGE. A launch that was
measured on this GPU replaces the default."""
LARGE = Launch(128, 128, 8, 3)
# sums of a group need registers in addition to the total: a larger tile would spill
LARGE_GROUPS = Launch(128, 64, 8, 3)
FLOAT32 = Launch(32, 16, 4, 2)


class Pairs(NamedTuple):
    """The pairs of a token and one of its experts. The number of a pair is token * K + rank."""

    experts: Tensor
    """int64 [P]: the expert of each pair."""
    order: Tensor | None
    """int32 [P]: the pairs sorted by expert; None for a single token."""
    starts: Tensor | None
    """int32 [N + 1]: the start of each expert's pairs in `order`, then the end."""


def route(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Compute the same as kernels/moe/reference.py. NaN and infinity are chosen first; of these, too, the lower number
    is first."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_chosen, device=logits.device)
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=logits.device)
    if num_tokens:
        size = triton.next_power_of_2(num_experts)
        _route[(num_tokens,)](
            logits.contiguous(), weights, chosen, num_experts, num_chosen, renormalise, SIZE=size, num_warps=1
        )
    return weights, chosen


def mixture(
    x: Tensor,
    gate_up: GPUWeight,
    down: GPUWeight,
    weights: Tensor,
    chosen: Tensor,
    gate_up_rows: ActivationFormat | None = None,
    down_rows: ActivationFormat | None = None,
) -> Tensor:
    """Compute the same as kernels/moe/__init__.py, with float32 sums."""
    (tokens, per_token), experts = chosen.shape, len(down.codes)
    hidden = torch.empty(tokens * per_token, gate_up.num_outputs, dtype=x.dtype, device=x.device)
    parts = torch.empty(tokens, per_token, down.num_outputs, dtype=torch.float32, device=x.device)
    if tokens:
        pairs = _sorted(chosen, experts)
        _multiply(x.contiguous(), gate_up, gate_up_rows, pairs, None, hidden)
        _multiply(hidden, down, down_rows, pairs, weights.float().contiguous(), parts)
    return parts.sum(1).to(x.dtype)


def _sorted(chosen: Tensor, num_experts: int) -> Pairs:
    pairs = chosen.flatten()
    if len(chosen) == 1:
        return Pairs(pairs, None, None)
    order = torch.empty(len(pairs), dtype=torch.int32, device=chosen.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=chosen.device)
    _sort[(num_experts + 1,)](pairs, order, starts, len(pairs), SIZE=SORTED_AT_ONCE)
    return Pairs(pairs, order, starts)


def _multiply(
    x: Tensor, weight: GPUWeight, rows: ActivationFormat | None, pairs: Pairs, weights: Tensor | None, output: Tensor
) -> None:
    """Compute the gated product if `weights` is None, else the weighted product. x has one row per token or per pair."""
    num_pairs, experts = len(pairs.experts), len(weight.codes) // (2 if weights is None else 1)
    expected = triton.cdiv(num_pairs, experts)
    default = ONE_TOKEN if pairs.order is None else _default_launch(expected, weight.num_groups > 1, x.dtype)
    x_scales = None
    if rows is not None:
        static_scales = None
        if rows.static_scales is not None:  # a token has different codes for each of its experts
            x, static_scales = x.repeat_interleave(num_pairs // len(x), 0), rows.static_scales[pairs.experts]
        x, x_scales = quantize_rows(x, rows.dtype, rows.group_size, static_scales)
    kernel = "gated experts" if weights is None else "weighted experts"
    # 1 is only for a single token, which has its own kernel
    launch = tuned_launch(kernel, 1 if pairs.order is None else max(2, expected), x, weight) or default
    shared = format_of(weight, x_scales, None if rows is None else rows.group_size) | launch.options
    shared |= {
        "experts": experts,
        "X_SCALES": 0 if x_scales is None else x_scales.shape[1],
        "PAIRS_OF_A_ROW": num_pairs // len(x),
    }
    tensors = (x, x_scales, *tensors_of(weight))
    tiles = triton.cdiv(weight.num_outputs, launch.outputs)
    if pairs.order is None:
        chunks = chunks_at_once(weight)
        _one_token[(num_pairs, tiles)](*tensors, pairs.experts, weights, output, CHUNKS=chunks, **shared)
        return
    blocks = num_pairs // launch.rows + experts  # upper bound: each expert rounds up
    grid = (blocks, tiles)
    _product[grid](*tensors, pairs.order, pairs.starts, weights, output, PAIRS=launch.rows, **shared)


def _default_launch(expected: int, has_groups: bool, dtype: torch.dtype) -> Launch:
    """`expected`: the average number of pairs per expert."""
    if dtype == torch.float32:
        return FLOAT32
    large = LARGE_GROUPS if has_groups else LARGE
    return next((launch for most, launch in LAUNCHES.items() if expected <= most), large)


@triton.jit
def _route(
    logits,
    weights,
    chosen,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    renormalise: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Select one token's experts, the most likely remaining expert at a time. `rank` is the position of a chosen
    expert, or `num_chosen`."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, SIZE)
    inside = expert < num_experts
    logit = tl.load(logits + token * num_experts + expert, mask=inside, other=float("-inf")).to(tl.float32)
    order = tl.where(logit == logit, logit, float("inf"))
    rank = tl.full([SIZE], num_chosen, tl.int32)
    for place in range(num_chosen):
        remaining = inside & (rank == num_chosen)
        likeliest = tl.max(tl.where(remaining, order, float("-inf")), 0)
        best = tl.min(tl.where(remaining & (order == likeliest), expert, SIZE), 0)
        rank = tl.where(expert == best, place, rank)
    is_chosen = rank < num_chosen
    share = tl.exp(logit - tl.max(order, 0))
    total = tl.sum(tl.where(is_chosen, share, 0.0) if renormalise else share, 0)
    tl.store(weights + token * num_chosen + rank, share / total, mask=is_chosen)
    tl.store(chosen + token * num_chosen + rank, expert.to(tl.int64), mask=is_chosen)


@triton.jit(do_not_specialize=["pairs"])
def _sort(chosen, order, starts, pairs, SIZE: tl.constexpr):
    """Write the pairs of one expert, in order, after the pairs of all lower experts. The last program only writes the
    end."""
    expert = tl.program_id(0)
    offset = tl.arange(0, SIZE)
    lower = tl.zeros([SIZE], tl.int32)
    for first in range(0, pairs, SIZE):
        number = tl.load(chosen + first + offset, mask=first + offset < pairs, other=0x7FFFFFFF)
        lower += (number < expert).to(tl.int32)
    start = tl.sum(lower, 0)
    tl.store(starts + expert, start)
    for first in range(0, pairs, SIZE):
        is_own = tl.load(chosen + first + offset, mask=first + offset < pairs, other=0x7FFFFFFF) == expert
        place = start + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + place, first + offset, mask=is_own)
        start += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def _one_token(
    x,
    x_scales,
    codes,
    scales,
    group_scales,
    zero_points,
    chosen,
    weights,
    output,
    experts: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr,
    X_CHUNKS: tl.constexpr,
    X_SCALES: tl.constexpr,
    PAIRS_OF_A_ROW: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Compute OUTPUTS outputs of one of the token's experts: silu(gate) * up without `weights`, the weighted product
    with them."""
    pair = tl.program_id(0)
    expert = tl.load(chosen + pair)
    number = pair // PAIRS_OF_A_ROW
    x += number * inputs
    if x_scales is not None:
        x_scales += number * X_SCALES
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    result = multiply_row(
        expert,
        x,
        x_scales,
        codes,
        scales,
        group_scales,
        zero_points,
        n,
        outputs,
        inputs,
        CHUNK,
        GROUPED,
        SCALE_OUTPUTS,
        X_CHUNKS,
        CHUNKS,
    )
    if weights is None:
        result = silu(result) * multiply_row(
            expert + experts,
            x,
            x_scales,
            codes,
            scales,
            group_scales,
            zero_points,
            n,
            outputs,
            inputs,
            CHUNK,
            GROUPED,
            SCALE_OUTPUTS,
            X_CHUNKS,
            CHUNKS,
        )
    else:
        result *= tl.load(weights + pair)
    tl.store(output + pair * outputs + n, result.to(output.dtype.element_ty), mask=n < outputs)


@triton.jit
def _product(
    x,
    x_scales,
    codes,
    scales,
    group_scales,
    zero_points,
    order,
    starts,
    weights,
    output,
    experts: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr,
    X_CHUNKS: tl.constexpr,
    X_SCALES: tl.constexpr,
    PAIRS_OF_A_ROW: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Compute OUTPUTS outputs for PAIRS pairs of one expert, as in `_one_token`."""
    block = tl.program_id(0)
    expert = find_segment(starts, experts, block, PAIRS)
    start, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    first = start + (block - (start // PAIRS + expert)) * PAIRS
    if first >= end:
        return
    expert = expert.to(tl.int64)
    inside = first + tl.arange(0, PAIRS) < end
    pair = tl.load(order + first + tl.arange(0, PAIRS), mask=inside, other=0)
    number = pair // PAIRS_OF_A_ROW
    row = x + number.to(tl.int64) * inputs
    x_scale = None
    if x_scales is not None:
        x_scale = x_scales + number * X_SCALES
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    chunks: tl.constexpr = (inputs + CHUNK - 1) // CHUNK
    result = multiply_rows(
        expert,
        row,
        inside,
        x_scale,
        codes,
        scales,
        group_scales,
        zero_points,
        n,
        0,
        chunks,
        outputs,
        inputs,
        CHUNK,
        GROUPED,
        SCALE_OUTPUTS,
        X_CHUNKS,
    )
    if weights is None:
        result = silu(result) * multiply_rows(
            expert + experts,
            row,
            inside,
            x_scale,
            codes,
            scales,
            group_scales,
            zero_points,
            n,
            0,
            chunks,
            outputs,
            inputs,
            CHUNK,
            GROUPED,
            SCALE_OUTPUTS,
            X_CHUNKS,
        )
    else:
        result *= tl.load(weights + pair, mask=inside, other=0.0)[None, :]
    place = pair.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(output + place, result.to(output.dtype.element_ty), mask=(n < outputs)[:, None] & inside[None, :])
