"""What every attention layer does once it has queries, keys and values.

T tokens, S sequences, H query heads, G key/value heads, D channels per key head, E per value head.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from kernels.kv_store import kv_store
from kernels.paged_attention import paged_attention
from models.batch import Batch, LayerCache


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
) -> Tensor:
    """Keep the new keys [T, G, D] and values [T, G, E]; every query [T, H, D] sees its sequence. Returns [T, H * E], in the last layer
    [R, H * E] of output rows.

    What the options mean is said at kernels/paged_attention.
    """
    keys, values = cache
    kv_store(key, value, keys, values, batch.slots)
    attended = paged_attention(
        batch.attending(query),
        keys,
        values,
        batch.block_tables,
        batch.attending_starts,
        batch.context_lengths,
        scale,
        soft_cap,
        window,
        alibi_slopes,
        prefix_lengths,
    )
    return attended.flatten(1)


def attend_latent(
    query: Tensor, key: Tensor, value_channels: int, cache: LayerCache, batch: Batch, scale: float
) -> Tensor:
    """Keep the new keys [T, 1, D], whose first so many channels are the values too; queries [T, H, D]. Returns [T, H, value_channels],
    in the last layer of output rows alone.

    This is attention over latents (arXiv 2405.04434): all heads share one key per token, and the cache's values have no channels.
    """
    keys, values = cache
    kv_store(key, key[..., :0], keys, values, batch.slots)
    return paged_attention(
        batch.attending(query),
        keys,
        replace(keys, channels=value_channels),
        batch.block_tables,
        batch.attending_starts,
        batch.context_lengths,
        scale,
    )


def alibi_slopes(num_heads: int) -> Tensor:
    """float32 [H]: 2^(-8i/H); for H no power of two those of the power below it, then every other one of twice that (arXiv 2108.12409)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")  # also where a model is being built without memory
