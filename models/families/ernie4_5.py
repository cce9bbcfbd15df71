"""Ernie 4.5: Llama's decoder with rotation of adjacent channel pairs. The head is tied by default."""

from dataclasses import dataclass, replace
from functools import partial

from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM, InterleavedRopeAttention, read_decoder_config
from models.layers.mlp import MLP
from models.layers.rotary import read_rotary_config


@dataclass(frozen=True)
class Ernie45Config(DecoderConfig):
    use_bias: bool


def read_config(config: ConfigReader) -> Ernie45Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.count("head_dim")  # transformers defaults to 128
    return Ernie45Config(**vars(read_ernie_config(config)), use_bias=config.get("use_bias", bool, False))


def read_ernie_config(config: ConfigReader) -> DecoderConfig:
    """Read the keys of both kinds of Ernie 4.5, with transformers' defaults."""
    config.expect("use_rmsnorm", (True, None), None)
    shape = read_decoder_config(config, 1e-5, 131072, partial(read_rotary_config, default_theta=5e5))
    return replace(shape, tie_word_embeddings=config.get("tie_word_embeddings", bool, True))


class Ernie45(DecoderLM):
    def __init__(self, c: Ernie45Config) -> None:
        layers = (
            DecoderLayer(
                c,
                InterleavedRopeAttention(c, None, c.use_bias, c.use_bias),
                MLP(c.hidden_size, c.intermediate_size, c.use_bias),
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers)
