"""Llama 1, 2, 3, 3.1, 3.2, TinyLlama and models of their architecture (arXiv 2302.13971)."""

from dataclasses import dataclass

from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.layers.mlp import MLP


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    attention_bias: bool
    mlp_bias: bool


def read_config(config: ConfigReader) -> LlamaConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    return LlamaConfig(
        **vars(read_decoder_config(config, rms_norm_eps=1e-6, max_position_embeddings=2048)),
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


class Llama(DecoderLM):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias),
                    MLP(c.hidden_size, c.intermediate_size, c.mlp_bias),
                )
                for _ in range(c.num_hidden_layers)
            ),
        )
