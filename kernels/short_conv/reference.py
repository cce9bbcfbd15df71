"""T tokens of S sequences, C channels, K taps, P slots."""

import torch
from torch import Tensor


def short_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    query_starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    ends: Tensor,
) -> Tensor:
    """Return y [T, C] of s[t] = bias + sum over j of weight[j] * input[t - K + 1 + j].

    If projected is [T, C], it is the input, and y is silu(s). If it is [T, 3 * C], it is b | c | x: the input is b * x,
    and y is c * s, as in LFM2. weight [K, C], bias [C], states [P, K-1, C]; query_starts [S+1], reads, writes and ends
    [S] int64. s is computed in float32. The product b * x, s before its product, and y are rounded to the dtype.

    Sequence s owns tokens query_starts[s] to query_starts[s+1]. The inputs of its K - 1 earlier tokens are
    states[reads[s]], oldest first. They are zeros if reads[s] is -1. The inputs of its last K - 1 tokens before
    ends[s] are written to states[writes[s]], unless writes[s] is -1 or the sequence has no token. No sequence reads a
    slot that another sequence writes. Rows after the last sequence are undefined.
    """
    is_gated = projected.shape[1] == 3 * weight.shape[1]
    b, c, x = projected.chunk(3, dim=1) if is_gated else (1, None, projected)  # [T, C] each
    inputs, out, num_before = b * x, torch.zeros_like(x), len(weight) - 1
    for s, (read, write, kept) in enumerate(zip(*map(Tensor.tolist, (reads, writes, ends)), strict=True)):
        start, end = query_starts[s : s + 2].tolist()
        if start == end:
            continue
        before = states[read] if read >= 0 else x.new_zeros(num_before, x.shape[1])
        tokens = torch.cat((before, inputs[start:end]))
        total = torch.zeros(end - start, x.shape[1], device=x.device) if bias is None else bias.float()
        for j in range(num_before + 1):
            total = total + weight[j].float() * tokens[j : j + end - start].float()
        out[start:end] = total / (1 + (-total).exp()) if c is None else c[start:end] * total.to(x.dtype)
        if write >= 0:
            states[write] = tokens[kept - start : kept - start + num_before]
    return out
