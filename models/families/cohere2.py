"""Command R7B and Command A (Cohere 2): attention and feed-forward in parallel, after one LayerNorm.

Sliding-window layers rotate queries and keys, in pairs of adjacent channels. Full-attention layers have no position
encoding.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from models.config import ConfigReader
from models.decoder import (
    Attention,
    DecoderConfig,
    InterleavedRopeAttention,
    NoPEAttention,
    WindowedConfig,
    read_decoder_config,
)
from models.families.gemma2 import read_patterned_windows
from models.families.granite import ScaledHead
from models.layer_norm_decoder import ParallelLayer, RotaryLayerNormLM
from models.layers.mlp import MLP
from models.layers.norm import LayerNorm
from models.layout import ModelLayout

FORM = {  # the form of the model in Cohere's own files
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


@dataclass(frozen=True)
class CohereShape(DecoderConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    attention_bias: bool
    logit_scale: float


@dataclass(frozen=True)
class Cohere2Config(CohereShape, WindowedConfig):
    pass


def read_config(config: ConfigReader) -> Cohere2Config:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    config.raw("use_parallel_embedding")  # a training setting
    for key, value in FORM.items():
        config.expect(key, (None, value), None)
    return Cohere2Config(**vars(read_shape(config)), windows=read_patterned_windows(config, full_every=4))


def read_shape(config: ConfigReader, theta: float = 10000.0) -> CohereShape:
    """Read the keys of both versions. `theta`: the default of rope_theta."""
    shape = read_decoder_config(config, 1e-5, 8192, theta=theta)
    config.expect("head_dim", (None, shape.hidden_size // shape.num_attention_heads), None)
    return CohereShape(
        **vars(shape)
        | {
            "rms_norm_eps": config.positive("layer_norm_eps", 1e-5),
            "tie_word_embeddings": config.get("tie_word_embeddings", bool, True),
        },
        attention_bias=config.get("attention_bias", bool, False),
        logit_scale=config.positive("logit_scale", 0.0625),
    )


class CohereLM(RotaryLayerNormLM):
    """The model of Command R and its successors."""

    layout = ModelLayout(
        norms=("input_layernorm",),
    )

    def __init__(self, c: CohereShape, attentions: Iterable[Attention]) -> None:
        mlps = (MLP(c.hidden_size, c.intermediate_size) for _ in range(c.num_hidden_layers))
        layers = (ParallelLayer(_norm(c), *parts) for parts in zip(attentions, mlps, strict=False))
        super().__init__(c, layers, _norm(c))
        self.lm_head = ScaledHead(self.embedding, c.tie_word_embeddings, 1 / c.logit_scale)  # type: ignore[arg-type]


def _norm(c: CohereShape) -> LayerNorm:
    return LayerNorm(c.hidden_size, c.rms_norm_eps, bias=False)


class Cohere2(CohereLM):
    def __init__(self, c: Cohere2Config) -> None:
        super().__init__(c, (_attention(c, window) for window in c.windows))


def _attention(c: Cohere2Config, window: int | None) -> Attention:
    attention = NoPEAttention if window is None else InterleavedRopeAttention
    return attention(c, window, c.attention_bias, c.attention_bias)
