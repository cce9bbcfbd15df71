"""T tokens of S sequences, H value heads of D channels, G key heads of N channels, P slots."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels.state_panels import advance


def gated_delta(
    qkv: Tensor,
    decay: Tensor,
    write_gate: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    group: int,
    value_channels: int,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """Return o [T, H * D] of the gated delta rule (arXiv 2412.06464, 2510.26692), token by token, in float32.

    A value head has a matrix M [N, D]. For each token M becomes g * M, then M + k (beta * (v - M^T k))^T, and o is
    M^T q. q and k are x / sqrt(sum(x^2) + 1e-6), and q is divided by sqrt(N). g = exp(-exp(decay_log) * softplus(decay
    + decay_bias)), beta = sigmoid(write_gate).

    qkv [T, 2 * G * N + H * D] has the heads of q, k and v. Value head h uses the key head (h // group) % G. decay,
    write_gate [T, H] have qkv's dtype; decay_log, decay_bias [H] are float32. decay [T, H * N] and decay_bias [H * N]
    are also possible: a row of M then has a decay of its own (Kimi Delta Attention). states, query_starts, reads, writes,
    ends: as of `state_panels.advance`. context_lengths [S]: the tokens of a sequence after the step, of which Triton
    computes the positions of its chunks.
    """
    num_keys, value_size = states.shape[3], states.shape[1] * value_channels
    key_size, out = (qkv.shape[1] - value_size) // 2, qkv.new_empty(qkv.shape[0], value_size)
    heads = torch.arange(states.shape[1], device=qkv.device) // group % max(1, key_size // max(1, num_keys))

    def update(t: int, m: Tensor) -> Tensor:
        q, k, v = qkv[t].float().split((key_size, key_size, value_size))
        q, k = (x.view(-1, num_keys)[heads] for x in (q, k))  # [H, N]
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        steps = softplus(decay[t].float() + decay_bias).view(len(decay_log), -1, 1)  # [H, 1 or N, 1]
        m = (-decay_log.exp()[:, None, None] * steps).exp() * m
        delta = write_gate[t].float().sigmoid()[:, None] * (
            v.view(len(decay_log), value_channels) - (k[..., None] * m).sum(1)
        )
        m = m + k[..., None] * delta[:, None]
        out[t] = ((q[..., None] * m).sum(1) * num_keys**-0.5).flatten()
        return m

    advance(states, value_channels, query_starts, reads, writes, ends, update)
    return out
