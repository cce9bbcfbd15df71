"""Ernie 3.5 SE, from PaddleNLP's checkpoints (llm/ernie-3.5-se/modeling.py), whose reader splits the fused matrices.

Layers have attention and feed-forward in parallel, after one LayerNorm. With `parallel_attn_hatf`, the first layer has
only attention, and the last layer has only a feed-forward.
T tokens, E hidden channels, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.errors import UserError
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig
from models.layers.attention import Heads
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles, RotaryConfig, RotaryEmbedding
from models.layout import ModelLayout

STRIDE = 8  # between adjacent positions if training used random positions
LONGEST = 4096  # tokens with this stride; for longer texts the stride depends on their length


@dataclass(frozen=True)
class Ernie35Config(DecoderConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    use_bias: bool
    head_bias: bool
    parallel_attn_hatf: bool


def read_config(config: ConfigReader) -> Ernie35Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.expect("tie_word_embeddings", (False, None), False)
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    config.check_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    head_dim = hidden_size // heads
    if head_dim % 2:
        raise UserError(
            f"config.json: hidden_size / num_attention_heads={head_dim} is odd, but channels are turned in pairs"
        )
    use_bias = config.get("use_bias", bool, False)
    is_hatf = config.get("parallel_attn_hatf", bool, True)
    layers = config.num_layers()
    if is_hatf and layers < 2:
        raise UserError(
            f"config.json: num_hidden_layers={layers} with parallel_attn_hatf: expected a first and a last one"
        )
    return Ernie35Config(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        rms_norm_eps=config.positive("layer_norm_eps", 1e-6),
        tie_word_embeddings=False,
        rotary=_rotary(config, head_dim),
        use_bias=use_bias,
        head_bias=config.get("weight_share_add_bias", bool, True) and use_bias,
        parallel_attn_hatf=is_hatf,
    )


def _rotary(config: ConfigReader, head_dim: int) -> RotaryConfig:
    """Read the rotary settings. Positions with a stride, 7, 15, 23 and so on, are a linear scaling by its inverse.

    Attention depends only on distances, so the first position does not matter.
    """
    length = config.count("max_position_embeddings", 2048)
    if not config.get("enable_random_position_ids", bool, False):
        return RotaryConfig(head_dim, length)
    return RotaryConfig(head_dim, min(length, STRIDE * LONGEST), type="linear", factor=1 / STRIDE)


class NoAttention(Module):
    """The attention of a layer without attention. Its heads have no channels, so that nothing is cached."""

    def __init__(self, c: Ernie35Config) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, 0, 0)


class DecoderLayer(Module):
    """y = x + attention(norm(x)) + mlp(norm(x)), or with only one of the two terms."""

    def __init__(self, c: Ernie35Config, has_attention: bool, has_mlp: bool) -> None:
        super().__init__()
        norm = LayerNorm(c.hidden_size, c.rms_norm_eps)
        if has_attention:
            self.input_layernorm = norm
            self.self_attn: Module = Attention(c, qkv_bias=c.use_bias, o_bias=c.use_bias and not has_mlp)
        else:
            self.post_attention_layernorm = norm
            self.self_attn = NoAttention(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, c.use_bias) if has_mlp else None
        self.has_attention = has_attention

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        if not self.has_attention:
            assert self.mlp is not None
            x = batch.attending(x)
            return x + self.mlp(self.post_attention_layernorm(x), batch)
        normed = self.input_layernorm(x)
        x = batch.attending(x) + self.self_attn(normed, angles, batch, cache)
        return x if self.mlp is None else x + self.mlp(batch.attending(normed), batch)


class Decoder(Module):
    def __init__(self, c: Ernie35Config) -> None:
        super().__init__()
        first, last = (0, c.num_hidden_layers - 1) if c.parallel_attn_hatf else (None, None)
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(c, has_attention=i != last, has_mlp=i != first) for i in range(c.num_hidden_layers)
        )
        self.norm = LayerNorm(c.hidden_size, c.rms_norm_eps)


class Ernie35(CausalLM):
    layout = ModelLayout(norms=("input_layernorm",), scale_fold_targets={})

    def __init__(self, c: Ernie35Config) -> None:
        super().__init__(c)
        self.model = Decoder(c)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, bias=c.head_bias)
        self.rotary = RotaryEmbedding(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)
