"""What every attention layer does once its new keys and values are in the cache (kernels/kv_store).

T tokens, R output rows, S sequences, H query heads, D channels per key head, E per value head.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.paged_attention import paged_attention
from models.batch import Batch, LayerCache


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer. A layer that was cut for a rank has fewer than the config says."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Channels of a query and of a key."""
    value_head_dim: int
    """Channels of a value; 0 where the keys are the values, too, so that none are stored."""
    first: int = 0
    """The number of the first query head in the whole layer."""
    first_key: int = 0
    """The number of the first key head in the whole layer."""
    num_whole_keys: int | None = None
    """How many key heads the whole layer has; None: these are all."""

    @property
    def whole_keys(self) -> int:
        """The number of key heads in the whole layer."""
        return self.num_whole_keys or self.num_key_value_heads

    @property
    def fused(self) -> tuple[int, int, int]:
        """The numbers of query, key and value heads in a fused projection."""
        return self.num_attention_heads, self.num_key_value_heads, self.num_key_value_heads

    def own(self, values: Tensor) -> Tensor:
        """Return what belongs to these query heads of something that the whole layer has for each."""
        return values.narrow(0, self.first, self.num_attention_heads)

    def split_groups(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, G, D] of a fused projection, [T, G * (H/G + 2) * D].

        It holds the queries of a key head, then that key, then its value. A layer that shares its key with others has all queries of it,
        and takes its own.
        """
        groups = fused.unflatten(-1, (self.num_key_value_heads, -1, self.head_dim))  # [T, G, H/G + 2, D]
        first = self.first % (groups.shape[2] - 2)
        query = groups[:, :, :-2].flatten(1, 2)[:, first : first + self.num_attention_heads]
        return query, groups[:, :, -2], groups[:, :, -1]

    def own_keys(self, values: Tensor, axis: int) -> Tensor:
        """Return what belongs to these key heads of something that the whole layer has for each, along an axis."""
        return values.narrow(axis, self.first_key, self.num_key_value_heads)


def attend(
    query: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
) -> Tensor:
    """Every query [T, H, D] sees its sequence. Returns [T, H * E], in the last layer [R, H * E] of output rows.

    What the options mean is said at kernels/paged_attention.
    """
    keys, values = cache
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


def attend_latent(query: Tensor, value_channels: int, cache: LayerCache, batch: Batch, scale: float) -> Tensor:
    """Attend where a key's first `value_channels` channels are its value, too. Returns [T or R, H, value_channels].

    This is attention over latents (arXiv 2405.04434): all heads share one key per token, and the cache's values have no channels.
    """
    keys, _ = cache
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
    """Return ALiBi's slopes 2^(-8i/H), i from 1 on, float32 [H] (arXiv 2108.12409).

    For H no power of two they are those of the power below it, then every other one of twice that power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")  # also where a model is being built without memory
