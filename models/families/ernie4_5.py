"""Ernie 4.5, from config.json: Llama's decoder that turns pairs of neighbours, tied by default."""

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
    """Raises UserError for a missing key, a wrong type, or a value that this file does not implement."""
    config.count("head_dim")  # transformers would take 128 where it is missing
    return Ernie45Config(**vars(read_ernie_config(config)), use_bias=config.get("use_bias", bool, False))


def read_ernie_config(config: ConfigReader) -> DecoderConfig:
    """Read what both kinds of Ernie have, with transformers' defaults."""
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
