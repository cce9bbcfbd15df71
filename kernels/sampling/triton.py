"""One program for each row finds what top-k and top-p keep without sorting, and draws, all in one launch.

R rows, V tokens in the vocabulary. The last value that is kept is searched among all float32 values in their order: each pass over the row
takes sums above three values and leaves a quarter of the range, so 16 passes find it exactly, ties included (after arXiv 2602.01518).
A row of 2^17 tokens stays in the L2 cache meanwhile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 4096, 8


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, steps: Tensor
) -> Tensor:
    """As kernels/sampling/reference.py says, with probabilities in float32: a token may fall on the other side of top_p or min_p if it is
    within 1e-6 of it. Nothing waits for the GPU."""
    logits = logits.contiguous()
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        tile = min(TILE, triton.next_power_of_2(vocab_size))
        each_row = (temperature, top_k, top_p, min_p, seeds, steps)
        _sample[(rows,)](logits, *each_row, tokens, vocab_size=vocab_size, TILE=tile, num_warps=WARPS)
    return tokens


def penalize(
    logits: Tensor, counts: Tensor, prompted: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """As kernels/sampling/reference.py says."""
    logits, counts, prompted = logits.contiguous(), counts.contiguous(), prompted.contiguous()
    output = torch.empty_like(logits)
    rows, vocab_size = logits.shape
    if rows:
        grid = (rows, triton.cdiv(vocab_size, TILE))
        _penalize[grid](logits, counts, prompted, repetition, presence, frequency, output, vocab_size, TILE=TILE)
    return output


@triton.jit
def _mix(x):
    """SplitMix64's finaliser, uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _rank(x):
    """int32 in the order of float32 values, those of 0 and -0 the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _tile(row, start, vocab_size: tl.constexpr, TILE: tl.constexpr):
    token = start + tl.arange(0, TILE)
    return token, tl.load(row + token, mask=token < vocab_size, other=float("-inf"))


@triton.jit
def _sums_above(
    row,
    lowest,
    first,
    second,
    third,
    highest,
    temperature,
    WEIGHTED: tl.constexpr,
    vocab_size: tl.constexpr,
    TILE: tl.constexpr,
):
    """Over the tokens whose rank is at least `lowest` and above each of three ranks: their number, or sum of exp((x - highest) / T)."""
    dtype: tl.constexpr = tl.float64 if WEIGHTED else tl.int32
    above_first = tl.zeros([], dtype)
    above_second = tl.zeros([], dtype)
    above_third = tl.zeros([], dtype)
    for start in range(0, vocab_size, TILE):
        token, x = _tile(row, start, vocab_size, TILE)
        rank = _rank(x).to(tl.int64)
        counted = (token < vocab_size) & (rank >= lowest)
        weight = tl.where(counted, tl.exp((x - highest) / temperature), 0.0) if WEIGHTED else counted.to(tl.int32)
        above_first += tl.sum(tl.where(rank > first, weight, 0), 0).to(dtype)
        above_second += tl.sum(tl.where(rank > second, weight, 0), 0).to(dtype)
        above_third += tl.sum(tl.where(rank > third, weight, 0), 0).to(dtype)
    return above_first, above_second, above_third


@triton.jit
def _last_kept(
    row, lowest, limit, highest, temperature, WEIGHTED: tl.constexpr, vocab_size: tl.constexpr, TILE: tl.constexpr
):
    """The lowest rank above which the sum is less than `limit`: that of the last token that is kept. The sum of all is not less."""
    low, high = lowest - 1, _rank(highest).to(tl.int64)
    while high - low > 1:
        width = high - low
        first, second, third = low + width // 4, low + width // 2, low + 3 * width // 4
        a, b, c = _sums_above(row, lowest, first, second, third, highest, temperature, WEIGHTED, vocab_size, TILE)
        low = tl.where(a < limit, low, tl.where(b < limit, first, tl.where(c < limit, second, third)))
        high = tl.where(a < limit, first, tl.where(b < limit, second, tl.where(c < limit, third, high)))
    return high


@triton.jit
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, steps, tokens, vocab_size: tl.constexpr, TILE: tl.constexpr
):
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * vocab_size
    highest, likeliest = tl.full([], float("-inf"), tl.float32), tl.full([], -1, tl.int32)
    for start in range(0, vocab_size, TILE):
        token, x = _tile(row, start, vocab_size, TILE)
        best, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        likeliest = tl.where(best > highest, start + place, likeliest)
        highest = tl.maximum(highest, best)
    temperature = tl.load(temperatures + r)
    if (temperature == 0) | (highest == float("-inf")):
        tl.store(tokens + r, likeliest.to(tl.int64))
        return

    lowest = tl.full([], -2139095041, tl.int64)  # the rank of -inf
    top_k, top_p = tl.load(top_ks + r), tl.load(top_ps + r)
    if (top_k > 0) & (top_k < vocab_size):
        lowest = _last_kept(row, lowest, top_k, highest, temperature, False, vocab_size, TILE)
    num_ties = tl.full([], vocab_size, tl.int32)  # of the tokens equal to the last one: how many are kept
    if top_p < 1:
        everything, _, _ = _sums_above(
            row, lowest, lowest - 1, lowest, lowest, highest, temperature, True, vocab_size, TILE
        )
        limit = top_p.to(tl.float64) * everything
        last = _last_kept(row, lowest, limit, highest, temperature, True, vocab_size, TILE)
        with_ties, before, _ = _sums_above(
            row, lowest, last - 1, last, last, highest, temperature, True, vocab_size, TILE
        )
        last_rank = last.to(tl.int32)
        value = (last_rank ^ ((last_rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        each = tl.exp((value - highest) / temperature).to(tl.float64)
        wanted = tl.ceil((limit - before) / each)
        num_ties = tl.where(with_ties - before > each * 1.5, tl.minimum(wanted, vocab_size * 1.0), 1.0).to(tl.int32)
        lowest = last

    seed = _mix(tl.load(seeds + r).to(tl.uint64))
    key = _mix(seed + (tl.load(steps + r) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    min_p = tl.load(min_ps + r)
    best_score, chosen, ties = tl.full([], float("-inf"), tl.float32), likeliest, tl.zeros([], tl.int32)
    for start in range(0, vocab_size, TILE):
        token, x = _tile(row, start, vocab_size, TILE)
        rank = _rank(x).to(tl.int64)
        scaled = (x - highest) / temperature
        tied = (rank == lowest) & (token < vocab_size)
        order = ties + tl.cumsum(tied.to(tl.int32), 0)  # from 1, in the order of ids
        kept = (rank > lowest) | (tied & (order <= num_ties))
        kept &= (token < vocab_size) & (tl.exp(scaled) >= min_p)
        bits = _mix(key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 24
        uniform = tl.minimum(
            (bits.to(tl.int64).to(tl.float32) + 0.5) * 9.094947017729282e-13, 1 - 5.9604645e-08
        )  # 2^-40, 2^-24
        # log(1 - u), whose small values the plain formula would round away
        exponential = tl.where(uniform < 1e-3, uniform * (1 + uniform * (0.5 + uniform / 3)), -tl.log(1 - uniform))
        score = tl.where(kept, scaled - tl.log(exponential), float("-inf"))
        best, place = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.where(best > best_score, start + place, chosen)
        best_score = tl.maximum(best_score, best)
        ties += tl.sum(tied.to(tl.int32), 0)
    tl.store(tokens + r, chosen.to(tl.int64))


@triton.jit
def _penalize(logits, counts, prompted, repetition, presence, frequency, output, vocab_size, TILE: tl.constexpr):
    r = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = token < vocab_size
    place = r.to(tl.int64) * vocab_size + token
    x = tl.load(logits + place, mask=mask, other=0.0)
    count = tl.load(counts + place, mask=mask, other=0)
    seen = (count > 0) | (tl.load(prompted + place, mask=mask, other=0) != 0)
    factor = tl.load(repetition + r)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    x -= tl.where(count > 0, tl.load(presence + r), 0.0)
    tl.store(output + place, x - tl.load(frequency + r) * count, mask=mask)
