"""Recurrent operators with states in slots, compared with themselves in other cuts and with formulas in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels import build
from kernels.threads import set_threads
from tests.helpers.ways import computing, every_way

NUM_SLOTS = 7
LENGTHS = [1, 63, 0, 5, 150]
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)
SEQUENCES = [slice(start, start + length) for start, length in zip(STARTS.tolist(), LENGTHS, strict=False)]

# Root mean square of the error, relative to the result's. Only the result is rounded.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}

Recurrence = Callable[..., Tensor]
"""Computes a slice of the tokens: of the slice, states, query_starts, reads, writes, ends, context_lengths."""


def noise(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near_float64(result: Tensor, expected: Tensor, factor: float = 1) -> None:
    error = (result.double() - expected).square().sum().sqrt()
    assert error <= factor * TOLERANCES[result.dtype] * expected.square().sum().sqrt()


def compute_sequences(
    compute: Recurrence, state_shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the result of all sequences together, and the states after the sequences that store one, by sequence."""
    states = torch.full((NUM_SLOTS, *state_shape), torch.nan, dtype=dtype)
    reads, writes = torch.full((len(LENGTHS),), -1), torch.tensor([3, -1, 5, 0, 6])
    result = compute(slice(None), states, STARTS, reads, writes, STARTS[1:], torch.tensor(LENGTHS))
    assert states[[1, 2, 4, 5]].isnan().all()  # of no sequence, or of one without a token
    return result, {s: states[slot] for s, slot in enumerate(writes.tolist()) if slot >= 0 and LENGTHS[s]}


def assert_same_bits(result: Tensor, expected: Tensor) -> None:
    assert result.equal(expected)


def check_instruction_sets(
    compute: Recurrence, state_shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> None:
    """Check that results and states have the same bits in every instruction set, with one thread and with three."""
    results, names = [], [way for way in every_way() if way in build.INSTRUCTION_SETS]
    for name, num_threads in [*((name, 1) for name in names[:1]), *((name, 3) for name in names)]:
        with computing(name):
            set_threads(num_threads)
            results.append(compute_sequences(compute, state_shape, dtype))
    for result, last_states in results[1:]:
        assert_same_bits(result, results[0][0])
        for s, state in last_states.items():
            assert_same_bits(state, results[0][1][s])


def check_cuts(
    compute: Recurrence,
    state_shape: tuple[int, ...],
    fixed_cuts: Sequence[int] = (),
    assert_same: Callable[[Tensor, Tensor], None] = assert_same_bits,
) -> Tensor:
    """Return the result of all sequences together. Check that each sequence in pieces has the same bits, or is the same
    as `assert_same` says. Its states pass through slots with old values, and drafts follow the pieces. The pieces end
    at `fixed_cuts`, or at random."""
    together, last_states = compute_sequences(compute, state_shape)
    generator = torch.Generator().manual_seed(6)
    for s, (start, length) in enumerate(zip(STARTS.tolist(), LENGTHS, strict=False)):
        random_cuts = torch.randint(0, length + 1, (4,), generator=generator).sort().values.tolist()
        cuts = [min(cut, length) for cut in fixed_cuts] or random_cuts
        read, state = -1, torch.full((2, *state_shape), torch.inf)
        for number, (first, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            write = number % 2 if number < 3 else max(read, 0)  # also in place
            num_drafts = min(number, length - end)  # which the state must not contain
            piece = slice(start + first, start + end + num_drafts)
            starts_of_piece, after = torch.tensor([0, end + num_drafts - first]), end + num_drafts
            result = compute(piece, state, starts_of_piece, *torch.tensor([[read], [write], [end - first], [after]]))
            assert_same(result, together[piece])
            read = write if len(result) else read
        if s in last_states:
            assert_same(state[read], last_states[s])
    return together


def ssd_in_float64(x: Tensor, keys: Tensor, queries: Tensor, step: Tensor, rate: Tensor, skip: Tensor) -> Tensor:
    """Return y [T, H, D] of a sequence: (L * C B^T) (step * x) + skip * x, where L has the products of the decays
    (arXiv 2405.21060). x [T, H, D], keys (B) and queries (C) [T, H, N], step [T, H], rate, skip [H]."""
    log = (-rate * step).cumsum(0)
    is_later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)[..., None]
    decays = (log[:, None] - log).masked_fill(is_later, -torch.inf).exp()
    scores = torch.einsum("thn,shn->tsh", queries, keys) * decays
    return torch.einsum("tsh,shd->thd", scores, step[..., None] * x) + skip[:, None] * x


def gated_delta_in_float64(qkv: Tensor, gates: list[Tensor], key_heads: list[int], sizes: tuple[int, int]) -> Tensor:
    """Return the result [T, H * D] of a whole sequence. `gates`: decay, write_gate, decay_log, decay_bias.

    decay has a number for each head, or for each of its key channels.
    """
    decay, write_gate, decay_log, decay_bias = (part.double() for part in gates)
    (num_keys, num_values), num_heads = sizes, len(key_heads)
    key_size = (qkv.shape[1] - num_heads * num_values) // 2
    q, k, v = qkv.double().split((key_size, key_size, num_heads * num_values), 1)
    q, k = (part.unflatten(1, (-1, num_keys))[:, key_heads] for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    steps = softplus(decay + decay_bias, threshold=80).unflatten(1, (num_heads, -1))  # [T, H, 1 or N]
    g, beta = (-decay_log.exp()[:, None] * steps).exp(), write_gate.sigmoid()
    m, rows = torch.zeros(num_heads, num_keys, num_values, dtype=torch.float64), list[Tensor]()
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v.unflatten(1, (num_heads, -1)), g, beta, strict=True):
        m = g_t[..., None] * m
        m = m + torch.einsum("hn,hd->hnd", k_t, beta_t[:, None] * (v_t - torch.einsum("hn,hnd->hd", k_t, m)))
        rows.append(torch.einsum("hn,hnd->hd", q_t, m).flatten() / num_keys**0.5)
    return torch.stack(rows) if rows else v
