"""Falcon 7B, 11B, 40B and 180B (arXiv 2311.16867). Models with ALiBi (falcon-rw) raise an error.

T tokens, H query heads, G key/value heads, D channels per head, E hidden channels.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.gelu import gelu
from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.decoder import DecoderConfig
from models.layers.attention import Heads, attend
from models.layers.embedding import Embedding
from models.layers.linear import Linear, make_head
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles, RotaryEmbedding, read_rotary_config
from models.layout import ModelLayout, Unit


@dataclass(frozen=True)
class FalconConfig(DecoderConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    bias: bool
    is_grouped: bool
    """Whether a fused projection holds each key/value head after its query heads. If false, all queries come first."""
    num_parallel_norms: int
    """0: attention, then feed-forward. 1: parallel with a common norm. 2: parallel with separate norms."""


def read_config(config: ConfigReader) -> FalconConfig:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    config.expect("alibi", (False, None), False)
    config.raw("ff_factor")  # ffn_hidden_size repeats it
    config.expect("activation", ("gelu",), "gelu")
    config.expect("apply_residual_connection_post_layernorm", (False, None), False)
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    config.expect("n_embed", (None, hidden_size), None)  # transformers would use it instead of hidden_size
    config.check_multiple("hidden_size", hidden_size, "2 * num_attention_heads", 2 * heads)
    is_grouped = config.get("new_decoder_architecture", bool, False)
    is_parallel = config.get("parallel_attn", bool, True)
    shares_key, groups = config.get("multi_query", bool, True), config.count("num_kv_heads", heads)
    if not is_grouped:
        groups = 1 if shares_key else heads
    config.check_multiple("num_attention_heads", heads, "num_kv_heads", groups)
    norms = config.expect("num_ln_in_parallel_attn", (None, 1, 2) if is_grouped else (None, 1), None)
    if is_grouped and not is_parallel:
        raise UserError("config.json: new_decoder_architecture=true is not supported with parallel_attn=false")
    head_dim = hidden_size // heads
    return FalconConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("ffn_hidden_size", 4 * hidden_size),
        num_hidden_layers=config.num_layers(),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("layer_norm_epsilon", 1e-5),
        bias=config.get("bias", bool, False),
        is_grouped=is_grouped or groups == heads,
        num_parallel_norms=(norms or 1 + is_grouped) if is_parallel else 0,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
        rotary=read_rotary_config(config, head_dim, config.count("max_position_embeddings", 2048)),
    )


class Attention(Module):
    def __init__(self, c: FalconConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        self.head_dim, self.is_grouped = c.head_dim, c.is_grouped
        self.query_key_value = Linear(c.hidden_size, sum(self.heads.fused) * c.head_dim, c.bias)
        self.dense = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, c.bias)

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        query, key, value = self._split(self.query_key_value(x, batch))
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots)
        return self.dense(attend(query, cache, batch, self.head_dim**-0.5), batch)

    def _split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, G, D] of a fused projection [T, (H + 2G) * D]."""
        if self.is_grouped:
            return self.heads.split_groups(fused)
        query, key, value = fused.unflatten(-1, (-1, self.head_dim)).split(self.heads.fused, dim=1)
        return query, key, value


class MLP(Module):
    def __init__(self, c: FalconConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = Linear(c.hidden_size, c.intermediate_size, c.bias)
        self.dense_4h_to_h = Linear(c.intermediate_size, c.hidden_size, c.bias)

    def forward(self, x: Activations, batch: Batch) -> Tensor:
        return self.dense_4h_to_h(gelu(self.dense_h_to_4h(x, batch)), batch)


class DecoderLayer(Module):
    """Attention and feed-forward in sequence, or in parallel after one or two norms."""

    def __init__(self, c: FalconConfig) -> None:
        super().__init__()
        self.norms = NORMS[c.num_parallel_norms]
        for name in self.norms:
            self.add_module(name, LayerNorm(c.hidden_size, c.rms_norm_eps))
        self.self_attention = Attention(c)
        self.mlp = MLP(c)
        self.is_parallel = c.num_parallel_norms > 0

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        attention_norm, mlp_norm = (getattr(self, name) for name in (self.norms[0], self.norms[-1]))
        has_common_norm = len(self.norms) == 1  # the feed-forward reads different rows of it in the last layer
        readers = () if has_common_norm else (self.self_attention.query_key_value,)
        normed, before = attention_norm(x, readers), batch.attending(x)
        x = before + self.self_attention(normed, angles, batch, cache)
        if has_common_norm:
            return x + self.mlp(batch.attending(normed), batch)
        normed = mlp_norm(before if self.is_parallel else x, (self.mlp.dense_h_to_4h,))
        return x + self.mlp(normed, batch)


NORMS = (("input_layernorm", "post_attention_layernorm"), ("input_layernorm",), ("ln_attn", "ln_mlp"))


class Transformer(Module):
    def __init__(self, c: FalconConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(c.vocab_size, c.hidden_size)
        self.h = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_hidden_layers))
        self.ln_f = LayerNorm(c.hidden_size, c.rms_norm_eps)


class Falcon(CausalLM):
    layout = ModelLayout(
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="self_attention",
        scale_fold_targets={},
        row_parallel=("dense", "dense_4h_to_h"),
    )

    def __init__(self, c: FalconConfig) -> None:
        super().__init__(c)
        norms = NORMS[c.num_parallel_norms]
        fused = (Unit.QUERY_HEAD, Unit.KEY_VALUE_HEAD, Unit.KEY_VALUE_HEAD)
        self.layout = replace(
            self.layout,
            norms=norms,
            units={"query_key_value": (Unit.KEY_VALUE_HEAD,) if c.is_grouped else fused},
        )
        self.transformer = Transformer(c)
        self.lm_head = make_head(self.transformer.word_embeddings, c.tie_word_embeddings)
        self.rotary = RotaryEmbedding(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)
