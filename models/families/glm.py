"""GLM-4-9B in the layout of transformers. The original layout is in chatglm2.py.

The first channels of a head are rotated, by default half of them, in pairs of adjacent channels. Module names match the
checkpoint's tensor names.
"""

from dataclasses import dataclass

from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM, InterleavedRopeAttention
from models.layers.mlp import FusedMLP
from models.layers.rotary import read_rotary_config
from models.layout import HEADS, ModelLayout, Unit


@dataclass(frozen=True)
class GlmConfig(DecoderConfig):
    attention_bias: bool


def read_config(config: ConfigReader) -> GlmConfig:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    config.activation(("silu",), "silu")
    heads = config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", 2)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    head_dim = config.count("head_dim", 128)
    return GlmConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=config.num_layers(),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("rms_norm_eps", 1.5625e-7),
        attention_bias=config.get("attention_bias", bool, True),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        rotary=read_rotary_config(
            config, head_dim, config.count("max_position_embeddings", 131072), partial_rotary_factor=0.5
        ),
    )


class GlmLayer(DecoderLayer):
    def __init__(self, c: GlmConfig) -> None:
        super().__init__(
            c, InterleavedRopeAttention(c, qkv_bias=c.attention_bias), FusedMLP(c.hidden_size, c.intermediate_size)
        )


class Glm(DecoderLM):
    layout = ModelLayout(
        scale_fold_targets={"o_proj": "v_proj"},
        units={**HEADS, "gate_up_proj": (Unit.CHANNEL, Unit.CHANNEL)},
    )

    def __init__(self, c: GlmConfig) -> None:
        super().__init__(c, (GlmLayer(c) for _ in range(c.num_hidden_layers)))
