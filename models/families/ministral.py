"""Ministral 8B: Mistral with a list of the layers that slide."""

from models.config import ConfigReader
from models.decoder import read_decoder_config
from models.families.cwm import CwmConfig
from models.families.gemma2 import FULL, SLIDING, layer_windows


def read_config(config: ConfigReader) -> CwmConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    shape = read_decoder_config(config, 1e-6, 131072)
    kind = FULL if config.raw("sliding_window", 4096) is None else SLIDING
    windows = layer_windows(config, [kind] * shape.num_hidden_layers, 4096)
    return CwmConfig(**vars(shape), windows=windows, mlp_bias=False)
