"""T new tokens of S sequences, M blocks in the longest block table, N blocks of B slots in the cache, H query heads in
G groups (one key/value head each), D channels per key head, E per value head. One sequence has Q new tokens and L
tokens in total."""

import torch
from torch import Tensor

from kernels.kv_format import PagedVectors


def paged_attention(
    query: Tensor,
    key_cache: PagedVectors,
    value_cache: PagedVectors,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) v of every new token over its sequence, up to and including the token itself.

    query [T, H, D]: rows query_starts[s] to query_starts[s+1] - 1 are the last tokens, possibly none, of sequence s,
    whose context_lengths[s] tokens are all in the caches [N, B, G, *] with D and E channels. Sequence s uses the first
    ceil(L / B) of block_tables [S, M]. block_tables, query_starts [S+1] and context_lengths [S] are int64.
    - soft_cap c: scores become c * tanh(score / c) (Gemma 2).
    - window w: a token attends to itself and the w - 1 tokens before it (arXiv 2310.06825).
    - chunk c: a token attends only to tokens of its chunk, which begins at a multiple of c (Llama 4). Without a window.
    - alibi_slopes [H] float32: slope * (key's position - query's position) is added to scores (arXiv 2108.12409).
    - prefix_lengths [S] int64: all tokens of a sequence attend to its first prefix_lengths[s] tokens.
    - sinks [H] float32: a score that takes part in every softmax of its head, without a value (gpt-oss).

    Returns [T, H, E] in query's dtype; the softmax is float32.
    """
    output = query.new_empty(*query.shape[:2], value_cache.channels)
    block_size, groups = key_cache.tensors[0].shape[1:3]
    starts, lengths = query_starts.tolist(), context_lengths.tolist()
    for s in (query_starts.diff() > 0).nonzero()[:, 0].tolist():
        length = lengths[s]
        blocks = block_tables[s, : -(-length // block_size)]
        keys = _read(key_cache, blocks, length).permute(1, 2, 0)  # [G, D, L]
        values = _read(value_cache, blocks, length).transpose(0, 1)  # [G, L, E]
        q = query[starts[s] : starts[s + 1]]  # [Q, H, D]
        grouped = q.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [G, H/G * Q, D]
        scores = (grouped @ keys).unflatten(1, (-1, q.shape[0])).float() * scale  # [G, H/G, Q, L]
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        position = torch.arange(length - q.shape[0], length, device=q.device)[:, None]  # [Q, 1]
        distance = torch.arange(length, device=q.device) - position  # [Q, L], above 0 for later tokens
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.unflatten(0, (groups, -1))[:, :, None, None] * distance
        hidden = _hidden(distance, position, window, chunk, None if prefix_lengths is None else prefix_lengths[s])
        weights = _softmax(scores.masked_fill(hidden, -torch.inf), sinks).to(q.dtype)  # [G, H/G, Q, L]
        output[starts[s] : starts[s + 1]] = _weighted(weights, values, hidden)
    return output


def _hidden(
    distance: Tensor, position: Tensor, window: int | None, chunk: int | None, prefix_length: Tensor | None
) -> Tensor:
    """Return whether a token at `position` [Q, 1] does not attend to a key [L], by their distance [Q, L]."""
    hidden = distance > 0
    if prefix_length is not None:
        hidden &= torch.arange(distance.shape[1], device=distance.device) >= prefix_length
    if window is not None:
        hidden |= distance <= -window
    if chunk is not None:
        hidden |= distance + position < position // chunk * chunk
    return hidden


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [G, H/G, Q, L] over the last axis and one more score per head, without its weight."""
    weights = scores.softmax(-1)
    if sinks is None:
        return weights
    sums = scores.logsumexp(-1, keepdim=True)
    return weights * (sums - sinks.view(*scores.shape[:2], 1, 1)).sigmoid()


def _weighted(weights: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Return weights [G, H/G, Q, L] times values [G, L, E]: [Q, H, E]. Values at `hidden` [Q, L] are excluded, because
    0 times NaN is NaN."""
    if values.isfinite().all():
        sums: Tensor = (weights.flatten(1, 2) @ values).unflatten(1, weights.shape[1:3])  # [G, H/G, Q, E]
    else:
        visible = [values.masked_fill(mask[:, None], 0) for mask in hidden]
        sums = torch.stack([weights[:, :, i] @ query_values for i, query_values in enumerate(visible)], dim=2)
    return sums.flatten(0, 1).transpose(0, 1)


def _read(cache: PagedVectors, blocks: Tensor, length: int) -> Tensor:
    """Return the first `length` vectors of a sequence's blocks: [L, G, D] in the cache's dtype."""
    stored = tuple(part[blocks].flatten(0, 1)[:length] for part in cache.tensors)
    return cache.format.decode(stored)[..., : cache.channels].to(cache.dtype)
