"""Gemma 3 (arXiv 2503.19786): Gemma 2 with query and key norms, and separate rotary settings for sliding-window layers.

T tokens, H query heads, G key/value heads, D channels per head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.families import gemma2
from models.families.gemma2 import WEIGHT_OFFSET, Gemma, Gemma2Config, read_patterned_windows, read_soft_cap
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles, AnglesByLayer, RotaryByLayer, RotaryConfig, read_rotary_by_layer


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    sliding_rotary: RotaryConfig
    """The rotary settings of sliding-window layers. `rotary` applies to full-attention layers."""

    @property
    def context_length(self) -> int:
        return self.rotary.max_position_embeddings  # the value after scaling


def read_config(config: ConfigReader) -> Gemma3Config:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    for key in ("hidden_act", "_sliding_window_pattern"):  # copies of hidden_activation and layer_types
        config.raw(key)
    config.expect("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", (None, False), None)
    config.expect("attn_logit_softcapping", (None,), None)
    heads, groups = config.count("num_attention_heads", 8), config.count("num_key_value_heads", 4)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    head_dim = config.count("head_dim", 256)
    if head_dim % 2:
        raise UserError(f"config.json: head_dim={head_dim} is odd, but rotary embedding turns pairs of channels")
    full_rotary, sliding_rotary = read_rotary_by_layer(
        config, head_dim, config.count("max_position_embeddings", 131072), theta=1e6, sliding_theta=1e4
    )
    return Gemma3Config(
        vocab_size=config.count("vocab_size", 262208),
        hidden_size=config.count("hidden_size", 2304),
        intermediate_size=config.count("intermediate_size", 9216),
        num_hidden_layers=config.num_layers(),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        attention_bias=config.get("attention_bias", bool, False),
        query_pre_attn_scalar=config.positive("query_pre_attn_scalar", 256.0),
        attn_logit_softcapping=None,
        final_logit_softcapping=read_soft_cap(config, "final_logit_softcapping", None),
        windows=read_patterned_windows(config, full_every=6),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
        rotary=full_rotary,
        sliding_rotary=sliding_rotary,
    )


class Attention(gemma2.Attention):
    def __init__(self, c: Gemma3Config, window: int | None) -> None:
        super().__init__(c, window)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, WEIGHT_OFFSET)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, WEIGHT_OFFSET)

    def forward(self, x: Activations, angles: AnglesByLayer, batch: Batch, cache: LayerCache) -> Tensor:  # type: ignore[override]
        return super().forward(x, angles.of(self.window), batch, cache)

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        query = self.q_norm(query.flatten(0, 1)).view(query.shape)  # [T, H, D]
        key = self.k_norm(key.flatten(0, 1)).view(key.shape)  # [T, G, D]
        return rope_and_store(query, key, value, *angles, *cache, batch.slots)


class Gemma3(Gemma):
    config: Gemma3Config

    def __init__(self, c: Gemma3Config) -> None:
        super().__init__(c, (Attention(c, window) for window in c.windows))
        self.rotary = RotaryByLayer(c.rotary, c.sliding_rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[AnglesByLayer]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)
