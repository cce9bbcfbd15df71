"""Qwen 3 30B A3B and 235B A22B: Qwen 3 with mixtures of experts (arXiv 2505.09388)."""

from dataclasses import dataclass, replace

from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.families.qwen3 import Attention
from models.layers.mlp import MLP
from models.layers.moe import MixtureConfig, SparseMoeBlock, read_mixture
from models.layers.sliding_window import read_windows
from models.layout import ModelLayout


@dataclass(frozen=True)
class Qwen3MoeConfig(DecoderConfig):
    mixture: MixtureConfig
    attention_bias: bool
    sliding_window: int | None

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, has_windows=self.sliding_window is not None)

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return self.mixture.sparse_layers[: self.num_hidden_layers]


def read_config(config: ConfigReader) -> Qwen3MoeConfig:
    shape = read_decoder_config(config)
    return Qwen3MoeConfig(
        **vars(shape),
        mixture=read_mixture(config, shape.num_hidden_layers),
        attention_bias=config.get("attention_bias", bool, False),
        sliding_window=_read_window(config, shape.num_hidden_layers),
    )


def _read_window(config: ConfigReader, num_layers: int) -> int | None:
    """Return the window of every layer. None: full attention. Raises UserError if only some layers have a window."""
    if not config.get("use_sliding_window", bool, False):
        read_windows(config, num_layers)
        return None
    config.expect("max_window_layers", (0, None), None)
    config.expect("layer_types", (["sliding_attention"] * num_layers, None), None)
    return config.count("sliding_window")


class Qwen3Moe(DecoderLM):
    layout = ModelLayout(replicated=("gate",))

    def __init__(self, c: Qwen3MoeConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, c.sliding_window, c.attention_bias, c.attention_bias),
                    SparseMoeBlock(c.hidden_size, c.mixture) if sparse else MLP(c.hidden_size, c.intermediate_size),
                )
                for sparse in c.layer_kinds
            ),
        )
