"""Phi-1, Phi-1.5 and Phi-2 (arXiv 2309.05463): attention and feed-forward in parallel, after one LayerNorm.

The first channels of a head are rotated.
"""

from dataclasses import dataclass

from kernels.gelu import gelu_tanh
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig
from models.layer_norm_decoder import ParallelLayer, RotaryLayerNormLM
from models.layers.mlp import UngatedMLP
from models.layers.norm import LayerNorm
from models.layers.rotary import read_rotary_config
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


class PhiAttention(Attention):
    output_name = "dense"


class MLP(UngatedMLP):
    names = ("fc1", "fc2")


class Phi(RotaryLayerNormLM):
    layout = ModelLayout(
        final_norm="model.final_layernorm",
        norms=("input_layernorm",),
        scale_fold_targets={},
        row_parallel=("dense", "fc2"),
    )

    def __init__(self, c: PhiConfig) -> None:
        layers = (
            ParallelLayer(
                _norm(c),
                PhiAttention(c, qkv_bias=True, o_bias=True),
                MLP(c.hidden_size, c.intermediate_size, True, gelu_tanh),
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, _norm(c), head_bias=True)


def _norm(c: PhiConfig) -> LayerNorm:
    return LayerNorm(c.hidden_size, c.rms_norm_eps)
