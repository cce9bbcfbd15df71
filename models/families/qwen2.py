"""Qwen 1.5, 2 and 2.5 (arXiv 2407.10671): Llama's decoder with query, key and value biases.

A sliding window is optional. By default it applies to the later layers.
"""

from dataclasses import dataclass

from models.config import ConfigReader
from models.decoder import Attention, DecoderLayer, DecoderLM, WindowedConfig, read_decoder_config
from models.layers.mlp import MLP
from models.layers.sliding_window import read_windows


@dataclass(frozen=True)
class Qwen2Config(WindowedConfig):
    """The config of Qwen 2."""


def read_config(config: ConfigReader) -> Qwen2Config:
    shape = read_decoder_config(config)
    return Qwen2Config(**vars(shape), windows=read_windows(config, shape.num_hidden_layers))


class Qwen2(DecoderLM):
    def __init__(self, c: Qwen2Config) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(c, Attention(c, window, qkv_bias=True), MLP(c.hidden_size, c.intermediate_size))
                for window in c.windows
            ),
        )
