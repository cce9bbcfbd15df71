"""Phi-1, Phi-1.5 and Phi-2 (arXiv 2309.05463): attention and feed-forward in parallel, after one LayerNorm.

The first channels of a head are rotated.
T tokens, H query heads, G key/value heads, D channels per head, E hidden channels, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.gelu import gelu_tanh
from kernels.kv_store import rope_and_store
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.decoder import DecoderConfig
from models.layers.attention import Heads, attend, merge_qkv
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles, RotaryEmbedding, read_rotary_config
from models.layout import ModelLayout


@dataclass(frozen=True)
class PhiConfig(DecoderConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""


def read_config(config: ConfigReader) -> PhiConfig:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    config.activation(("gelu_new", "gelu_pytorch_tanh"), "gelu_new")  # two names of one function
    config.expect("qk_layernorm", (False, None), False)
    config.expect("tie_word_embeddings", (False,), False)  # the head has a bias
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", heads)
    config.check_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    head_dim = hidden_size // heads
    config.expect("head_dim", (None, head_dim), None)
    return PhiConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=config.num_layers(),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("layer_norm_eps", 1e-5),
        tie_word_embeddings=False,
        rotary=read_rotary_config(
            config, head_dim, config.count("max_position_embeddings", 2048), partial_rotary_factor=0.5
        ),
    )


class Attention(Module):
    def __init__(self, c: PhiConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.qkv = merge_qkv(self, c.hidden_size, self.heads, bias=True)
        self.dense = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)

    def fuse(self) -> None:
        self.qkv.merge()

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        projected = self.qkv(x, batch)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)  # [T, H, D], [T, G, D] twice
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots)
        return self.dense(attend(query, cache, batch, self.head_dim**-0.5), batch)


class MLP(Module):
    def __init__(self, c: PhiConfig) -> None:
        super().__init__()
        self.fc1 = Linear(c.hidden_size, c.intermediate_size)
        self.fc2 = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.fc2(gelu_tanh(self.fc1(x, batch)), batch)


class DecoderLayer(Module):
    """y = x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, c: PhiConfig) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        normed = self.input_layernorm(x)  # floats: in the last layer, attention and feed-forward read different rows
        x = batch.attending(x) + self.self_attn(normed, angles, batch, cache)
        return x + self.mlp(batch.attending(normed), batch)


class Decoder(Module):
    def __init__(self, c: PhiConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_hidden_layers))
        self.final_layernorm = LayerNorm(c.hidden_size, c.rms_norm_eps)


class Phi(CausalLM):
    layout = ModelLayout(
        final_norm="model.final_layernorm",
        norms=("input_layernorm",),
        scale_fold_targets={},
        row_parallel=("dense", "fc2"),
    )

    def __init__(self, c: PhiConfig) -> None:
        super().__init__(c)
        self.model = Decoder(c)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        self.rotary = RotaryEmbedding(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)
