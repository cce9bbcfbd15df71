"""Code World Model (arXiv 2510.02387): Llama with sliding windows in three of four layers."""

from dataclasses import dataclass

from conf.errors import UserError
from models.config import ConfigReader
from models.decoder import Attention, DecoderLayer, DecoderLM, WindowedConfig, read_decoder_config
from models.families.gemma2 import FULL, SLIDING, layer_windows
from models.layers.mlp import MLP


@dataclass(frozen=True)
class CwmConfig(WindowedConfig):
    mlp_bias: bool


def read_config(config: ConfigReader) -> CwmConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    if config.raw("rope_parameters") is None and config.raw("rope_scaling") is None:
        raise UserError(
            "config.json: rope_parameters is missing: give rope_type, factor and the other settings of llama3"
        )
    shape = read_decoder_config(config, 1e-5, 131072, theta=1e6)
    types = [SLIDING if i % 4 else FULL for i in range(shape.num_hidden_layers)]
    return CwmConfig(
        **vars(shape),
        windows=layer_windows(config, types, 8192),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


class Cwm(DecoderLM):
    def __init__(self, c: CwmConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(c, Attention(c, window), MLP(c.hidden_size, c.intermediate_size, c.mlp_bias))
                for window in c.windows
            ),
        )
