"""Qwen 3 30B A3B and 235B A22B: Qwen 3 with mixtures of experts (arXiv 2505.09388).

T tokens, E hidden channels, N experts.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from kernels.moe import route
from models.config import ConfigReader
from models.decoder import MLP, DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.layers.linear import FloatLinear
from models.layers.moe import Experts, MixtureConfig, read_mixture
from models.layers.sliding_window import read_windows
from models.qwen3 import Attention


@dataclass(frozen=True)
class Qwen3MoeConfig(DecoderConfig):
    mixture: MixtureConfig
    attention_bias: bool


def read_config(config: ConfigReader) -> Qwen3MoeConfig:
    shape = read_decoder_config(config)
    config.expect("use_sliding_window", (False, None), False)  # no published model has windows
    read_windows(config, shape.num_hidden_layers)
    return Qwen3MoeConfig(
        **vars(shape),
        mixture=read_mixture(config, shape.num_hidden_layers),
        attention_bias=config.get("attention_bias", bool, False),
    )


class SparseMoeBlock(nn.Module):
    def __init__(self, c: Qwen3MoeConfig) -> None:
        super().__init__()
        self.mixture = c.mixture
        self.gate = FloatLinear(c.hidden_size, c.mixture.num_experts, bias=False)
        self.experts = Experts(
            (MLP(c.hidden_size, c.mixture.moe_intermediate_size) for _ in range(c.mixture.num_experts)),
            c.mixture.num_experts_per_tok,
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = route(self.gate(x), self.mixture.num_experts_per_tok, self.mixture.norm_topk_prob)
        return self.experts(x, weights, chosen)  # type: ignore[no-any-return]


class Qwen3Moe(DecoderLM):
    replicated = ("gate",)

    def __init__(self, c: Qwen3MoeConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, None, c.attention_bias),
                    SparseMoeBlock(c) if sparse else MLP(c.hidden_size, c.intermediate_size),
                )
                for sparse in c.mixture.sparse_layers
            ),
        )
