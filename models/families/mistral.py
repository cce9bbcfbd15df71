"""Mistral 7B, Nemo and Small 2501 (arXiv 2310.06825).

Llama's decoder with an optional sliding window in every layer.
"""

from dataclasses import dataclass, replace

from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.layers.mlp import MLP
from models.layers.sliding_window import read_window


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    sliding_window: int | None

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, has_windows=self.sliding_window is not None)


def read_config(config: ConfigReader) -> MistralConfig:
    """Read config.json. Without the key, `sliding_window` is 4096, as in transformers' MistralConfig."""
    return MistralConfig(**vars(read_decoder_config(config)), sliding_window=read_window(config, default=4096))


class Mistral(DecoderLM):
    def __init__(self, c: MistralConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(c, Attention(c, c.sliding_window), MLP(c.hidden_size, c.intermediate_size))
                for _ in range(c.num_hidden_layers)
            ),
        )
