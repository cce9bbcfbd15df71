"""Gemma 2 (arXiv 2408.00118).

T tokens, E hidden channels, F feed-forward channels, V vocabulary, R output rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.quantize_rows import Activations
from kernels.soft_cap import soft_cap
from models import decoder
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.decoder import WindowedConfig
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.mlp import GELUMLP
from models.layers.module import Module
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles, RotaryEmbedding, read_rotary_config
from models.layout import ModelLayout

SLIDING, FULL = "sliding_attention", "full_attention"
WEIGHT_OFFSET = 1.0  # norms multiply by 1 + weight


@dataclass(frozen=True)
class Gemma2Config(WindowedConfig):
    attention_bias: bool
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None


def read_config(config: ConfigReader) -> Gemma2Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.raw("hidden_act")  # a copy of the activation; the original code reads hidden_activation
    config.expect("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", (None, False), None)
    heads, groups = config.count("num_attention_heads"), config.count("num_key_value_heads")
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    head_dim = config.count("head_dim", 256)
    if head_dim % 2:
        raise UserError(f"config.json: head_dim={head_dim} is odd, but rotary embedding turns pairs of channels")
    return Gemma2Config(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=config.num_layers(),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        attention_bias=config.get("attention_bias", bool, False),
        query_pre_attn_scalar=config.positive("query_pre_attn_scalar", 256.0),
        attn_logit_softcapping=read_soft_cap(config, "attn_logit_softcapping", 50.0),
        final_logit_softcapping=read_soft_cap(config, "final_logit_softcapping", 30.0),
        windows=read_windows(config, full_every=2),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
        rotary=read_rotary_config(config, head_dim, config.count("max_position_embeddings", 8192)),
    )


def read_soft_cap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """Return a soft cap. null means None; an absent key means the default."""
    return None if config.raw(key, default) is None else config.positive(key, default)


def read_windows(config: ConfigReader, full_every: int) -> tuple[int | None, ...]:
    """Return the window of each layer. None: full attention.

    Every `full_every`th layer has full attention, unless `layer_types` is present.
    """
    types = [SLIDING if i % full_every else FULL for i in range(1, config.num_layers() + 1)]
    return layer_windows(config, types, 4096)


def layer_windows(config: ConfigReader, types: list[str], length: int) -> tuple[int | None, ...]:
    """Return windows as `read_windows` does. `types`, `length`: the defaults of layer_types and sliding_window."""
    num_layers, types = len(types), config.raw("layer_types") or types
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (SLIDING, FULL) for kind in types):
        raise UserError(f"config.json: layer_types={types!r} is not {num_layers} times {SLIDING!r} or {FULL!r}")
    if SLIDING not in types:
        config.raw("sliding_window")
        return (None,) * num_layers
    if config.raw("sliding_window", length) is None:
        raise UserError("config.json: sliding_window is null, but layers slide: give its length, or layer_types")
    window = config.count("sliding_window", length)
    return tuple(window if kind == SLIDING else None for kind in types)


def read_patterned_windows(config: ConfigReader, full_every: int) -> tuple[int | None, ...]:
    """Read windows as `read_windows` does. Without `layer_types`, `sliding_window_pattern` replaces `full_every`."""
    is_pattern = config.raw("sliding_window_pattern") is not None and config.raw("layer_types") is None
    return read_windows(config, config.count("sliding_window_pattern") if is_pattern else full_every)


def norm(c: Gemma2Config) -> RMSNorm:
    return RMSNorm(c.hidden_size, c.rms_norm_eps, WEIGHT_OFFSET)


class Attention(decoder.Attention):
    def __init__(self, c: Gemma2Config, window: int | None) -> None:
        super().__init__(c, window, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
        self.scale = c.query_pre_attn_scalar**-0.5
        self.soft_cap = c.attn_logit_softcapping


class DecoderLayer(Module):
    def __init__(self, c: Gemma2Config, self_attn: decoder.Attention) -> None:
        super().__init__()
        self.input_layernorm = norm(c)
        self.self_attn = self_attn
        self.post_attention_layernorm = norm(c)
        self.pre_feedforward_layernorm = norm(c)
        self.mlp = GELUMLP(c.hidden_size, c.intermediate_size)
        self.post_feedforward_layernorm = norm(c)

    def forward(self, x: Tensor, angles: Any, batch: Batch, cache: LayerCache) -> Tensor:
        """`angles`: any type that the attention takes."""
        attended = self.self_attn(self.input_layernorm(x, self.self_attn.readers), angles, batch, cache)
        x = batch.attending(x) + self.post_attention_layernorm(attended)
        normed = self.pre_feedforward_layernorm(x, self.mlp.readers)
        return x + self.post_feedforward_layernorm(self.mlp(normed, batch))


class Decoder(Module):
    def __init__(self, c: Gemma2Config, attentions: Iterable[decoder.Attention]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(c, attention) for attention in attentions)
        self.norm = norm(c)


class CappedHead(Linear):
    """A head with soft-capped logits: c * tanh(logit / c)."""

    def __init__(self, embedding: Embedding, tied: bool, cap: float | None) -> None:
        vocab_size, channels = embedding.shape
        super().__init__(channels, vocab_size, bias=False, embedding=embedding if tied else None)
        self.cap = cap

    def forward(self, x: Activations, batch: Batch | None) -> Tensor:
        logits, cap = super().forward(x, batch), self.cap
        return logits if cap is None else soft_cap(logits, cap)


class Gemma(CausalLM):
    """The model of Gemma 2 and 3. A subclass defines `layer_inputs`."""

    config: Gemma2Config
    layout = ModelLayout(
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        norm_weight_offset=WEIGHT_OFFSET,
    )

    def __init__(self, c: Gemma2Config, attentions: Iterable[decoder.Attention]) -> None:
        super().__init__(c)
        self.model = Decoder(c, attentions)
        self.lm_head = CappedHead(self.model.embed_tokens, c.tie_word_embeddings, c.final_logit_softcapping)

    def embed(self, batch: Batch) -> Tensor:
        x: Tensor = self.model.embed_tokens(batch.token_ids)  # [T, E]
        # The scale is rounded to the model's dtype, as in training. In bfloat16, 59.8665 becomes 59.75.
        return x * x.new_full((), self.config.hidden_size**0.5)


class Gemma2(Gemma):
    def __init__(self, c: Gemma2Config) -> None:
        super().__init__(c, (Attention(c, window) for window in c.windows))
        self.rotary = RotaryEmbedding(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)
