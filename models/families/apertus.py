"""Apertus (Swiss AI, arXiv 2509.14233): Qwen 3's attention, and a feed-forward of xIELU without gate.

T tokens, F feed-forward channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.errors import UserError
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLM, read_decoder_config
from models.decoder import DecoderLayer as PreNormLayer
from models.families.qwen3 import Attention
from models.layers.mlp import UngatedMLP
from models.layers.module import Module
from models.layout import ModelLayout


@dataclass(frozen=True)
class ApertusConfig(DecoderConfig):
    attention_bias: bool


def read_config(config: ConfigReader) -> ApertusConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    for key, value in (("mlp_bias", False), ("post_norm", False), ("qk_norm", True)):
        config.expect(key, (None, value), None)
    if not (config.raw("rope_parameters") or config.raw("rope_scaling")):
        raise UserError("config.json: rope_parameters is missing")
    return ApertusConfig(
        **vars(read_decoder_config(config, 1e-5, 65536, activations=("xielu",), theta=12e6)),
        attention_bias=config.get("attention_bias", bool, False),
    )


class XIELU(Module):
    """xIELU (arXiv 2411.13010): quadratic above 0, exponential below, with learned factors."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.beta, self.eps = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor [T, F] in the dtype of x [T, F], computed in float32 by operators that graphs can hold."""
        wide, beta = x.float(), self.beta.float()
        positive = _softplus(self.alpha_p) * wide * wide
        bounded = -torch.maximum(-wide, -self.eps.float())  # exp of large numbers would overflow
        negative = (bounded.exp() - 1 - wide) * (beta + _softplus(self.alpha_n))
        return (torch.where(wide > 0, positive, negative) + beta * wide).to(x.dtype)


def _softplus(x: Tensor) -> Tensor:
    return torch.log(1 + x.float().exp())


class DecoderLayer(PreNormLayer):
    names = ("attention_layernorm", "self_attn", "feedforward_layernorm", "mlp")


class Apertus(DecoderLM):
    layout = ModelLayout(
        norms=("attention_layernorm", "feedforward_layernorm"), scale_fold_targets={"o_proj": "v_proj"}
    )

    def __init__(self, c: ApertusConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, None, c.attention_bias, c.attention_bias),
                    UngatedMLP(c.hidden_size, c.intermediate_size, False, XIELU()),
                )
                for _ in range(c.num_hidden_layers)
            ),
        )
