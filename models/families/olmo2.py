"""OLMo 2 (arXiv 2501.00656). OLMo 3 and EXAONE 4 share its form: norms only after attention and feed-forward.

T tokens, H query heads, G key/value heads, D channels per head, E hidden channels.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kernels.kv_store import rope_and_store
from models import decoder
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.decoder import DecoderConfig, read_decoder_config
from models.layers.embedding import Embedding
from models.layers.linear import make_head
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles, RotaryByLayer, RotaryEmbedding
from models.layout import ModelLayout

IN_FLOAT32 = 0.0  # the norm rounds once, after the weight, as `rms_norm` does with an offset


@dataclass(frozen=True)
class Olmo2Config(DecoderConfig):
    attention_bias: bool


def read_config(config: ConfigReader) -> Olmo2Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    shape = read_decoder_config(config, rms_norm_eps=1e-5, max_position_embeddings=2048)
    return Olmo2Config(**vars(shape), attention_bias=config.get("attention_bias", bool, False))


class Attention(decoder.Attention):
    """Attention with a norm over all queries of a token, and a norm over all its keys.

    Each rank computes all queries and keys, and attends with its own heads.
    """

    norm_weight_offset: float | None = IN_FLOAT32

    def __init__(self, c: Olmo2Config, window: int | None = None) -> None:
        super().__init__(c, window, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
        self.q_norm = RMSNorm(c.num_attention_heads * c.head_dim, c.rms_norm_eps, self.norm_weight_offset)
        self.k_norm = RMSNorm(c.num_key_value_heads * c.head_dim, c.rms_norm_eps, self.norm_weight_offset)

    def normed(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as they are before the rotation."""
        return self.q_norm(query.flatten(1)).view(query.shape), self.k_norm(key.flatten(1)).view(key.shape), value

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        """`query` and `key` are of the whole layer, `value` is of this rank."""
        heads = self.heads
        query, key, value = self.normed(query, key, value)
        query = query.narrow(1, heads.first, heads.num_attention_heads)  # [T, H, D]
        key = heads.slice_keys(key, 1)  # [T, G, D]
        return rope_and_store(query, key, value, *angles, *cache, batch.slots)


class PostNormLayer(Module):
    """y = x + norm(attention(x)), then y + norm(mlp(y))."""

    def __init__(self, c: DecoderConfig, self_attn: decoder.Attention, weight_offset: float | None) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, weight_offset)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, weight_offset)

    def forward(self, x: Tensor, angles: Any, batch: Batch, cache: LayerCache) -> Tensor:
        """`angles`: any type that the attention takes."""
        x = batch.attending(x) + self.post_attention_layernorm(self.self_attn(x, angles, batch, cache))
        return x + self.post_feedforward_layernorm(self.mlp(x, batch))


class Decoder(Module):
    def __init__(self, c: DecoderConfig, attentions: Iterable[decoder.Attention], weight_offset: float | None) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(PostNormLayer(c, attention, weight_offset) for attention in attentions)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, weight_offset)


class PostNormLM(CausalLM):
    """A model of `PostNormLayer`s. `weight_offset`: as for `RMSNorm`."""

    layout = ModelLayout(norms=())

    def __init__(
        self,
        c: DecoderConfig,
        attentions: Iterable[decoder.Attention],
        weight_offset: float | None = None,
        rotary: RotaryByLayer | None = None,
    ) -> None:
        """`rotary`: None if all layers use `c.rotary`."""
        super().__init__(c)
        self.model = Decoder(c, attentions, weight_offset)
        self.lm_head = make_head(self.model.embed_tokens, c.tie_word_embeddings)
        self.rotary = rotary or RotaryEmbedding(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Any]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)


class Olmo2(PostNormLM):
    layout = replace(PostNormLM.layout, replicated=("q_proj", "k_proj"))

    def __init__(self, c: Olmo2Config) -> None:
        super().__init__(c, (Attention(c) for _ in range(c.num_hidden_layers)), IN_FLOAT32)
