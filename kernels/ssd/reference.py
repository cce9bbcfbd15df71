"""T tokens of S sequences, H heads of D channels, G groups of N state channels, P slots."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels.state_panels import advance


def ssd(
    xbc: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    decay_log: Tensor,
    skip: Tensor,
    states: Tensor,
    group: int,
    head_channels: int,
    min_step: float,
    max_step: float,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
    context_lengths: Tensor,
) -> Tensor:
    """Return y [T, H * D] of Mamba-2's state space layer (arXiv 2405.21060), token by token, in float32.

    A head has a matrix M [N, D]. For each token M becomes a * M + B (step * x)^T, and y is M^T C + skip * x.
    step = softplus(dt + dt_bias), at least min_step and at most max_step; a = exp(-exp(decay_log) * step).

    xbc [T, H * D + 2 * G * N] has x of the heads, then B and C of the groups. Head h uses the group h // group. dt
    [T, H] has xbc's dtype; dt_bias, decay_log (A_log of the checkpoint), skip (D of the paper) [H] are float32. states,
    query_starts, reads, writes, ends: as of `state_panels.advance`. context_lengths [S]: the tokens of a sequence after the
    step, of which Triton computes the positions of its chunks.
    """
    num_states, size = states.shape[3], states.shape[1] * head_channels
    group_size, out = (xbc.shape[1] - size) // 2, xbc.new_empty(xbc.shape[0], size)
    groups = torch.arange(states.shape[1], device=xbc.device) // group

    def update(t: int, m: Tensor) -> Tensor:
        x, b, c = xbc[t].float().split((size, group_size, group_size))
        x, b, c = x.view(len(skip), head_channels), b.view(-1, num_states)[groups], c.view(-1, num_states)[groups]
        step = softplus(dt[t].float() + dt_bias).clamp(min_step, max_step)
        a = (-decay_log.exp() * step).exp()
        m = a[:, None, None] * m + b[..., None] * (step[:, None] * x)[:, None]
        out[t] = ((c[..., None] * m).sum(1) + skip[:, None] * x).flatten()
        return m

    advance(states, head_channels, query_starts, reads, writes, ends, update)
    return out
