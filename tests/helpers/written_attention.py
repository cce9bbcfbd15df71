"""Attention computed in plain loops, one token at a time."""

from typing import Any

import torch

Options = dict[str, Any]


def written_out(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, s: int, options: Options
) -> torch.Tensor:
    """Return the attention of query [Q, H, D], the last of the L tokens of keys [L, G, D] and values [L, G, E], of
    sequence s."""
    result = torch.zeros(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    first, heads_per_group = len(keys) - len(query), query.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(heads_per_group, 1) for part in (keys, values))  # per head
    cap, window, chunk, slopes = (options.get(name) for name in ("soft_cap", "window", "chunk", "alibi_slopes"))
    prefix = int(options["prefix_lengths"][s]) if "prefix_lengths" in options else 0
    for i in range(len(query)):
        position = first + i
        seen = [j for j in range(len(keys)) if j <= position or j < prefix]
        seen = [j for j in seen if window is None or j > position - window]
        seen = [j for j in seen if chunk is None or j >= position // chunk * chunk]
        scores = (keys[seen] * query[i].double()).sum(-1) * scale  # [seen, H]
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        if slopes is not None:
            scores = scores + slopes.double() * torch.tensor([[j - position] for j in seen])
        highest, total = scores.amax(0), 0
        if (sinks := options.get("sinks")) is not None:
            total = (sinks.double() - highest).exp()
        weights = (scores - highest).exp()
        result[i] = ((weights / (weights.sum(0) + total))[:, :, None] * values[seen]).sum(0)
    return result
