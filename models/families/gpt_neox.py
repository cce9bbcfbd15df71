"""GPT-NeoX, Pythia and models of their architecture (arXiv 2204.06745).

The first channels of a head are rotated. T tokens, H heads, D channels per head, E hidden channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.decoder import DecoderConfig
from models.layers.attention import Heads, attend
from models.layers.embedding import Embedding
from models.layers.linear import Linear, make_head
from models.layers.mlp import GELUS, UngatedMLP
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles, RotaryEmbedding, read_rotary_config
from models.layout import ModelLayout, Unit


@dataclass(frozen=True)
class GPTNeoXConfig(DecoderConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    hidden_act: str
    attention_bias: bool
    use_parallel_residual: bool


def read_config(config: ConfigReader) -> GPTNeoXConfig:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    for key in ("classifier_dropout", "hidden_dropout", "is_decoder"):  # settings of other heads and of training
        config.raw(key)
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    config.check_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    head_dim = hidden_size // heads
    share, theta = config.positive("rotary_pct", 0.25), config.positive("rotary_emb_base", 10000.0)
    config.expect("rope_theta", (None, theta), None)
    return GPTNeoXConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=config.num_layers(),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        rms_norm_eps=config.positive("layer_norm_eps", 1e-5),
        hidden_act=config.activation(tuple(GELUS), "gelu"),
        attention_bias=config.get("attention_bias", bool, True),
        use_parallel_residual=config.get("use_parallel_residual", bool, True),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        rotary=read_rotary_config(
            config,
            head_dim,
            config.count("max_position_embeddings", 2048),
            partial_rotary_factor=share,
            default_theta=theta,
        ),
    )


class Attention(Module):
    def __init__(self, c: GPTNeoXConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.query_key_value = Linear(c.hidden_size, 3 * c.hidden_size, c.attention_bias)
        self.dense = Linear(c.hidden_size, c.hidden_size, c.attention_bias)

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        fused = self.query_key_value(x, batch).unflatten(-1, (-1, 3, self.head_dim))  # [T, H, 3, D]
        query, key, value = fused.unbind(2)  # [T, H, D] each
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots)
        return self.dense(attend(query, cache, batch, self.head_dim**-0.5), batch)


class MLP(UngatedMLP):
    names = ("dense_h_to_4h", "dense_4h_to_h")


class DecoderLayer(Module):
    def __init__(self, c: GPTNeoXConfig) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(c)
        self.post_attention_layernorm = LayerNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, True, GELUS[c.hidden_act])
        self.is_parallel = c.use_parallel_residual

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        normed = self.input_layernorm(x, [self.attention.query_key_value])
        attended = self.attention(normed, angles, batch, cache)
        x = batch.attending(x)
        total = x + attended
        normed = self.post_attention_layernorm(x if self.is_parallel else total, self.mlp.readers)
        return total + self.mlp(normed, batch)


class Decoder(Module):
    def __init__(self, c: GPTNeoXConfig) -> None:
        super().__init__()
        self.embed_in = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_hidden_layers))
        self.final_layer_norm = LayerNorm(c.hidden_size, c.rms_norm_eps)


class GPTNeoX(CausalLM):
    layout = ModelLayout(
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        attention="attention",
        scale_fold_targets={},
        row_parallel=("dense", "dense_4h_to_h"),
        units={"query_key_value": (Unit.QKV_HEAD,)},
    )

    def __init__(self, c: GPTNeoXConfig) -> None:
        super().__init__(c)
        self.gpt_neox = Decoder(c)
        self.embed_out = make_head(self.gpt_neox.embed_in, c.tie_word_embeddings)
        self.rotary = RotaryEmbedding(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)
