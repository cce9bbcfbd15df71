"""Qwen 3 30B A3B and 235B A22B: Qwen 3 with mixtures of experts (arXiv 2505.09388)."""

from dataclasses import dataclass

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

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return self.mixture.sparse_layers[: self.num_hidden_layers]


def read_config(config: ConfigReader) -> Qwen3MoeConfig:
    shape = read_decoder_config(config)
    config.expect("use_sliding_window", (False, None), False)  # no published model has windows
    read_windows(config, shape.num_hidden_layers)
    return Qwen3MoeConfig(
        **vars(shape),
        mixture=read_mixture(config, shape.num_hidden_layers),
        attention_bias=config.get("attention_bias", bool, False),
    )


class Qwen3Moe(DecoderLM):
    layout = ModelLayout(replicated=("gate",))

    def __init__(self, c: Qwen3MoeConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, None, c.attention_bias),
                    SparseMoeBlock(c.hidden_size, c.mixture) if sparse else MLP(c.hidden_size, c.intermediate_size),
                )
                for sparse in c.layer_kinds
            ),
        )
