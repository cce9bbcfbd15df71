"""One program per row applies top-k and top-p without sorting and draws by inversion, all in one launch.

R rows, V tokens in the vocabulary. The smallest kept value is found by a search over all float32 values in order: each
pass over the row computes sums above three values and leaves a quarter of the range, so 16 passes find it exactly, ties
included (after arXiv 2602.01518). A row of 2^17 tokens stays in the L2 cache between passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 4096, 8


def draw(logits: Tensor, settings: Tensor) -> Tensor:
    """Compute the same as kernels/sampling/reference.py, with weights in float32.

    The results may differ for a token whose cumulative probability or weight is within 1e-6 of top_p, min_p or the
    uniform number. There is no synchronisation with the GPU.
    """
    logits = logits.contiguous()
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        tile = min(TILE, triton.next_power_of_2(vocab_size))
        _draw[(rows,)](logits, settings.contiguous(), tokens, vocab_size=vocab_size, TILE=tile, num_warps=WARPS)
    return tokens


@triton.jit
def _rank(x):
    """Return int32 numbers in the order of the float32 values. 0 and -0 have the same number."""
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
    """Return three numbers, one per given rank: the count, or the sum of exp((x - highest) / temperature), of tokens
    with a rank of at least `lowest` and above the given rank."""
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
    """Return the lowest rank above which the sum is less than `limit`: the rank of the last kept token. The sum over
    all tokens is at least `limit`."""
    low, high = lowest - 1, _rank(highest).to(tl.int64)
    while high - low > 1:
        width = high - low
        first, second, third = low + width // 4, low + width // 2, low + 3 * width // 4
        a, b, c = _sums_above(row, lowest, first, second, third, highest, temperature, WEIGHTED, vocab_size, TILE)
        low = tl.where(a < limit, low, tl.where(b < limit, first, tl.where(c < limit, second, third)))
        high = tl.where(a < limit, first, tl.where(b < limit, second, tl.where(c < limit, third, high)))
    return high


@triton.jit
def _kept_weights(
    row, start, lowest, num_ties, ties, min_p, highest, temperature, vocab_size: tl.constexpr, TILE: tl.constexpr
):
    """Return a tile's tokens, their weights (float64, 0 if not kept), and the number of tokens equal to the last kept
    value.

    `ties`: the number of equal tokens in earlier tiles. The first `num_ties` equal tokens are kept.
    """
    token, x = _tile(row, start, vocab_size, TILE)
    rank = _rank(x).to(tl.int64)
    weight = tl.exp((x - highest) / temperature)
    tied = (rank == lowest) & (token < vocab_size)
    order = ties + tl.cumsum(tied.to(tl.int32), 0)  # from 1, in the order of token ids
    kept = (rank > lowest) | (tied & (order <= num_ties))
    kept &= (token < vocab_size) & (weight >= min_p)
    return token, tl.where(kept, weight, 0.0).to(tl.float64), tl.sum(tied.to(tl.int32), 0)


@triton.jit
def _draw(logits, settings, tokens, vocab_size: tl.constexpr, TILE: tl.constexpr):
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * vocab_size
    settings += r * 5
    highest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocab_size, TILE):
        token, x = _tile(row, start, vocab_size, TILE)
        highest = tl.maximum(highest, tl.max(x, 0))
    temperature, min_p = tl.load(settings).to(tl.float32), tl.load(settings + 3).to(tl.float32)
    top_k, top_p, uniform = tl.load(settings + 1).to(tl.int32), tl.load(settings + 2), tl.load(settings + 4)

    lowest = tl.full([], -2139095041, tl.int64)  # the rank of -inf
    if (top_k > 0) & (top_k < vocab_size):
        lowest = _last_kept(row, lowest, top_k, highest, temperature, False, vocab_size, TILE)
    num_ties = tl.full([], vocab_size, tl.int32)  # the number of kept tokens among those equal to the last kept value
    if top_p < 1:
        everything, _, _ = _sums_above(
            row, lowest, lowest - 1, lowest, lowest, highest, temperature, True, vocab_size, TILE
        )
        limit = top_p * everything
        last = _last_kept(row, lowest, limit, highest, temperature, True, vocab_size, TILE)
        with_ties, before, _ = _sums_above(
            row, lowest, last - 1, last, last, highest, temperature, True, vocab_size, TILE
        )
        last_rank = last.to(tl.int32)
        value = (last_rank ^ ((last_rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tie_weight = tl.exp((value - highest) / temperature).to(tl.float64)
        num_needed = tl.ceil((limit - before) / tie_weight)
        num_ties = tl.where(with_ties - before > tie_weight * 1.5, tl.minimum(num_needed, vocab_size * 1.0), 1.0).to(
            tl.int32
        )
        lowest = last

    total, ties = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(0, vocab_size, TILE):
        token, weight, tied = _kept_weights(
            row, start, lowest, num_ties, ties, min_p, highest, temperature, vocab_size, TILE
        )
        total += tl.sum(weight, 0)
        ties += tied
    target, below, ties = uniform * total, tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    chosen, likely = tl.full([], vocab_size, tl.int32), tl.zeros([], tl.int32)
    for start in range(0, vocab_size, TILE):
        token, weight, tied = _kept_weights(
            row, start, lowest, num_ties, ties, min_p, highest, temperature, vocab_size, TILE
        )
        reached = (weight > 0) & (below + tl.cumsum(weight, 0) > target)
        chosen = tl.minimum(chosen, tl.min(tl.where(reached, token, vocab_size), 0))
        likely = tl.maximum(likely, tl.max(tl.where(weight > 0, token, 0), 0))
        below += tl.sum(weight, 0)
        ties += tied
    # rounding: sums may stay below the total
    tl.store(tokens + r, tl.where(chosen < vocab_size, chosen, likely).to(tl.int64))
