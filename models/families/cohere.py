"""Command R, Command R+ and Aya (Cohere): Cohere 2 with full attention and rotation in all layers.

T tokens, H query heads, G key/value heads, D channels per head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.layer_norm import layer_norm
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import Attention, InterleavedRopeAttention
from models.families.cohere2 import CohereLM, CohereShape, read_shape
from models.layers.module import Module
from models.layers.rotary import Angles


@dataclass(frozen=True)
class CohereConfig(CohereShape):
    use_qk_norm: bool


def read_config(config: ConfigReader) -> CohereConfig:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    return CohereConfig(**vars(read_shape(config, theta=5e5)), use_qk_norm=config.get("use_qk_norm", bool, False))


class HeadNorm(Module):
    """LayerNorm without bias of each head, with a weight for each head."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim))
        self.eps = eps

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, H, D]; `weight` [H, D]: of these heads."""
        return layer_norm(x.flatten(0, 1), None, None, self.eps).view(x.shape) * weight


class NormedAttention(InterleavedRopeAttention):
    """Attention with a norm of each query and key before the rotation. Each rank holds the norms of all heads."""

    def __init__(self, c: CohereConfig) -> None:
        super().__init__(c, None, c.attention_bias, c.attention_bias)
        self.q_norm = HeadNorm(c.num_attention_heads, c.head_dim, c.rms_norm_eps)
        self.k_norm = HeadNorm(c.num_key_value_heads, c.head_dim, c.rms_norm_eps)

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        heads = self.heads
        query = self.q_norm(query, self.q_norm.weight.narrow(0, heads.first, heads.num_attention_heads))
        key = self.k_norm(key, heads.slice_keys(self.k_norm.weight, 0))
        return super().turn_and_store(query, key, value, angles, batch, cache)


class Cohere(CohereLM):
    def __init__(self, c: CohereConfig) -> None:
        super().__init__(c, (_attention(c) for _ in range(c.num_hidden_layers)))


def _attention(c: CohereConfig) -> Attention:
    return (
        NormedAttention(c) if c.use_qk_norm else InterleavedRopeAttention(c, None, c.attention_bias, c.attention_bias)
    )
