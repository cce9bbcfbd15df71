"""gated_delta compared with the formula in float64, and with itself in other cuts."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels.gated_delta import gated_delta, state_shape
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way

NUM_SLOTS = 7
LENGTHS = [1, 63, 0, 5, 150]
# Root mean square of the error, relative to the result's. Only the result is rounded.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def noise(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_float64(qkv: Tensor, gates: list[Tensor], key_heads: list[int], sizes: tuple[int, int]) -> Tensor:
    """Return the result [T, H * D] of a whole sequence. `gates`: decay, write_gate, decay_log, decay_bias."""
    decay, write_gate, decay_log, decay_bias = (part.double() for part in gates)
    (num_keys, num_values), num_heads = sizes, len(key_heads)
    key_size = (qkv.shape[1] - num_heads * num_values) // 2
    q, k, v = qkv.double().split((key_size, key_size, num_heads * num_values), 1)
    q, k = (part.unflatten(1, (-1, num_keys))[:, key_heads] for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    g, beta = (-decay_log.exp() * softplus(decay + decay_bias, threshold=80)).exp(), write_gate.sigmoid()
    m, rows = torch.zeros(num_heads, num_keys, num_values, dtype=torch.float64), list[Tensor]()
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v.unflatten(1, (num_heads, -1)), g, beta, strict=True):
        m = g_t[:, None, None] * m
        m = m + torch.einsum("hn,hd->hnd", k_t, beta_t[:, None] * (v_t - torch.einsum("hn,hnd->hd", k_t, m)))
        rows.append(torch.einsum("hn,hnd->hd", q_t, m).flatten() / num_keys**0.5)
    return torch.stack(rows)


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each(
    "num_keys, num_values, group, key_heads, threads",
    [(8, 5, 1, [0], 1), (33, 80, 1, [0, 1, 0, 1], 3), (64, 32, 2, [0, 0, 1], 2)],
)
@poisoned()
def test_any_cut_has_the_bits_of_the_whole(
    num_keys: int, num_values: int, group: int, key_heads: list[int], threads: int, dtype: torch.dtype
) -> None:
    """All sequences together, and each in pieces whose states pass through slots with old values. Drafts follow the
    pieces."""
    set_threads(threads)
    num_heads, num_tokens = len(key_heads), sum(LENGTHS)
    qkv = noise(num_tokens, 2 * (max(key_heads) + 1) * num_keys + num_heads * num_values, dtype=dtype, seed=1)
    gates = [3 * noise(num_tokens, num_heads, dtype=dtype, seed=seed) for seed in (2, 3)]
    gates += [noise(num_heads, dtype=torch.float32, seed=seed) for seed in (4, 5)]
    gates[0][-1] = 60  # softplus(60) is 60, and the state decays to zeros
    starts, generator = torch.tensor([0, *LENGTHS]).cumsum(0), torch.Generator().manual_seed(6)
    states = torch.full((NUM_SLOTS, *state_shape(num_heads, num_keys, num_values)), torch.nan)
    reads, writes = torch.full((len(LENGTHS),), -1), torch.tensor([3, -1, 5, 0, 6])
    whole = gated_delta(qkv, *gates, states, group, num_values, starts, reads, writes, starts[1:])
    assert states[[1, 2, 4, 5]].isnan().all()  # of no sequence, or of one without a token
    pieces = [slice(start, start + length) for start, length in zip(starts.tolist(), LENGTHS, strict=False) if length]
    inputs = [(qkv[piece], [gates[0][piece], gates[1][piece], *gates[2:]]) for piece in pieces]
    expected = torch.cat([in_float64(*parts, key_heads, (num_keys, num_values)) for parts in inputs])
    error = (whole.double() - expected).square().mean().sqrt()
    assert error <= TOLERANCES[dtype] * expected.square().mean().sqrt()
    for s, start, length in zip(range(5), starts.tolist(), LENGTHS, strict=False):
        cuts = torch.randint(0, length + 1, (4,), generator=generator).sort().values.tolist()
        read, state = -1, torch.full((2, *states.shape[1:]), torch.inf)
        for number, (first, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            write = number % 2 if number < 3 else max(read, 0)  # also in place
            num_drafts = min(number, length - end)  # which the state must not contain
            piece = slice(start + first, start + end + num_drafts)
            starts_of_piece = torch.tensor([0, end + num_drafts - first])
            slots = torch.tensor([[read], [write], [end - first]])
            parts = qkv[piece], gates[0][piece], gates[1][piece], *gates[2:]
            result = gated_delta(*parts, state, group, num_values, starts_of_piece, *slots)
            assert result.equal(whole[piece])
            read = write if len(result) else read
        if length and writes[s] >= 0:
            assert states[writes[s]].equal(state[read])
