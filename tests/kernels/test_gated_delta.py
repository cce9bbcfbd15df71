"""gated_delta compared with the formula in float64, and with itself in other cuts."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels.gated_delta import gated_delta, state_shape
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.recurrences import SEQUENCES, STARTS, assert_near_float64, check_cuts, noise
from tests.helpers.ways import any_way


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
    return torch.stack(rows) if rows else v


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
    set_threads(threads)
    num_heads, num_tokens = len(key_heads), int(STARTS[-1])
    qkv = noise(num_tokens, 2 * (max(key_heads) + 1) * num_keys + num_heads * num_values, dtype=dtype, seed=1)
    decay, write_gate = (3 * noise(num_tokens, num_heads, dtype=dtype, seed=seed) for seed in (2, 3))
    logs = [noise(num_heads, dtype=torch.float32, seed=seed) for seed in (4, 5)]
    decay[-1] = 60  # softplus(60) is 60, and the state decays to zeros

    def compute(piece: slice, states: Tensor, *slots: Tensor) -> Tensor:
        return gated_delta(qkv[piece], decay[piece], write_gate[piece], *logs, states, group, num_values, *slots)

    result = check_cuts(compute, state_shape(num_heads, num_keys, num_values))
    inputs = [(qkv[piece], [decay[piece], write_gate[piece], *logs]) for piece in SEQUENCES]
    assert_near_float64(result, torch.cat([in_float64(*parts, key_heads, (num_keys, num_values)) for parts in inputs]))
