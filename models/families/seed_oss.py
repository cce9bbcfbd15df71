"""Seed-OSS: Llama with separate bias settings for the qkv projections and the output projection."""

from dataclasses import dataclass

from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.layers.mlp import MLP


@dataclass(frozen=True)
class SeedOssConfig(DecoderConfig):
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool


def read_config(config: ConfigReader) -> SeedOssConfig:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    config.raw("residual_dropout")  # a training setting
    config.count("head_dim")  # transformers defaults to 128
    return SeedOssConfig(
        **vars(read_decoder_config(config, rms_norm_eps=1e-6, max_position_embeddings=524288)),
        attention_bias=config.get("attention_bias", bool, True),
        attention_out_bias=config.get("attention_out_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


class SeedOss(DecoderLM):
    def __init__(self, c: SeedOssConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_out_bias),
                    MLP(c.hidden_size, c.intermediate_size, c.mlp_bias),
                )
                for _ in range(c.num_hidden_layers)
            ),
        )
