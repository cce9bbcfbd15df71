"""T new tokens of S sequences, M blocks in the longest table, N blocks of B slots in the cache,
H query heads in G groups (one key/value head each), D channels per head; for one sequence: Q new tokens, L tokens in all."""

import torch
from torch import Tensor


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
) -> Tensor:
    """softmax(scale * q k^T) v for every new token over its own sequence, up to and including itself.

    query [T, H, D]: sequence s owns rows query_starts[s] to query_starts[s+1], the last of its context_lengths[s] tokens,
    whose keys and values are in the cache already. Caches [N, B, G, D]; block_tables [S, M] int64, of which sequence s uses the
    first ceil(L / B); query_starts [S+1], context_lengths [S] int64. Returns [T, H, D] in query's dtype; the softmax is float32.
    """
    output = torch.empty_like(query)
    block_size, groups = key_cache.shape[1], key_cache.shape[2]
    starts = query_starts.tolist()
    for s, length in enumerate(context_lengths.tolist()):
        blocks = block_tables[s, : -(-length // block_size)]
        keys = key_cache[blocks].flatten(0, 1)[:length].permute(1, 2, 0)  # [G, D, L]
        values = value_cache[blocks].flatten(0, 1)[:length].transpose(0, 1)  # [G, L, D]
        q = query[starts[s] : starts[s + 1]]  # [Q, H, D]
        grouped = q.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [G, H/G * Q, D]
        scores = (grouped @ keys).unflatten(1, (-1, q.shape[0])) * scale  # [G, H/G, Q, L]
        position = torch.arange(length - q.shape[0], length, device=q.device)[:, None]  # [Q, 1]
        hidden = torch.arange(length, device=q.device) > position  # [Q, L]
        weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1)
        weights = weights.to(q.dtype).flatten(1, 2)  # [G, H/G * Q, L]
        attended = (weights @ values).unflatten(1, (-1, q.shape[0]))  # [G, H/G, Q, D]
        output[starts[s] : starts[s + 1]] = attended.flatten(0, 1).transpose(0, 1)
    return output
