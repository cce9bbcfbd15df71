"""Helium (arXiv 2410.00037): Llama that rotates adjacent channels, with norms that round once."""

from dataclasses import dataclass
from typing import ClassVar

from models.config import ConfigReader
from models.decoder import DecoderLayer, DecoderLM, InterleavedRopeAttention, read_decoder_config
from models.families.llama import LlamaConfig
from models.families.olmo2 import IN_FLOAT32
from models.layers.mlp import MLP


@dataclass(frozen=True)
class HeliumConfig(LlamaConfig):
    norm_weight_offset: ClassVar = IN_FLOAT32


def read_config(config: ConfigReader) -> HeliumConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    return HeliumConfig(
        **vars(read_decoder_config(config, 1e-8, 4096, theta=1e5)),
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


class Helium(DecoderLM):
    def __init__(self, c: HeliumConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    InterleavedRopeAttention(c, qkv_bias=c.attention_bias),
                    MLP(c.hidden_size, c.intermediate_size, c.mlp_bias),
                )
                for _ in range(c.num_hidden_layers)
            ),
        )
