"""Attention over the KV cache. The new keys and values are already in the cache (kernels/kv_store).

T tokens, R output rows, S sequences, H query heads, D channels per key head, E channels per value head.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kernels.paged_attention import paged_attention
from models.batch import Batch, LayerCache
from models.layers.linear import Linear, MergedLinear


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer. On a tensor-parallel rank these are the rank's heads only."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Channels of one query and of one key head."""
    value_head_dim: int
    """Channels of one value head. 0 if the keys are also the values, so that no values are stored."""
    first: int = 0
    """The index of the first query head in the whole layer."""
    first_key: int = 0
    """The index of the first key head in the whole layer."""
    num_whole_keys: int | None = None
    """The number of key heads in the whole layer. None: this layer is whole."""

    @property
    def whole_keys(self) -> int:
        """The number of key heads in the whole layer."""
        return self.num_whole_keys or self.num_key_value_heads

    @property
    def fused(self) -> tuple[int, int, int]:
        """The numbers of query, key and value heads in a fused projection."""
        return self.num_attention_heads, self.num_key_value_heads, self.num_key_value_heads

    def slice_queries(self, values: Tensor) -> Tensor:
        """Return the entries of these query heads from a tensor with one entry per query head of the whole layer."""
        return values.narrow(0, self.first, self.num_attention_heads)

    def split_groups(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a fused projection [T, G * (H/G + 2) * D] into queries [T, H, D], and keys and values [T, G, D].

        For each key head the projection holds its queries, then the key, then the value. If several ranks share a key
        head, the projection holds all queries of this key head, and the rank takes its own.
        """
        groups = fused.unflatten(-1, (self.num_key_value_heads, -1, self.head_dim))  # [T, G, H/G + 2, D]
        first = self.first % (groups.shape[2] - 2)
        query = groups[:, :, :-2].flatten(1, 2)[:, first : first + self.num_attention_heads]
        return query, groups[:, :, -2], groups[:, :, -1]

    def slice_keys(self, values: Tensor, axis: int) -> Tensor:
        """Return the entries of these key heads along `axis`, as `slice_queries` does for query heads."""
        return values.narrow(axis, self.first_key, self.num_key_value_heads)


def merge_qkv(owner: nn.Module, hidden_size: int, heads: Heads, bias: bool) -> MergedLinear:
    """Return the projection of x [T, hidden_size] to queries, keys and values. `owner` gets its parts q_proj, k_proj, v_proj."""
    outputs = {
        "q_proj": heads.num_attention_heads * heads.head_dim,
        "k_proj": heads.num_key_value_heads * heads.head_dim,
        "v_proj": heads.num_key_value_heads * heads.value_head_dim,
    }
    return MergedLinear(owner, {name: Linear(hidden_size, size, bias) for name, size in outputs.items()})


def attend(
    query: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attend with every query [T, H, D] over its sequence. Returns [T, H * E], in the last layer [R, H * E].

    kernels/paged_attention describes the options.
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
        sinks,
        chunk,
    )
    return attended.flatten(1)


def attend_latent(query: Tensor, value_channels: int, cache: LayerCache, batch: Batch, scale: float) -> Tensor:
    """Attend where the first C = `value_channels` channels of a key are also its value: [T, H, C] or [R, H, C].

    This is multi-head latent attention (arXiv 2405.04434): all heads share one key per token, and no values are cached.
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
    """Return the ALiBi slopes 2^(-8i/H) for i = 1 to H, float32 [H] (arXiv 2108.12409).

    If H is not a power of two, the slopes for the next lower power come first, then every second slope of twice that
    power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")  # even while a model is built on the meta device
