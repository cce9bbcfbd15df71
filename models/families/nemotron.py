"""Nemotron 3 8B, Nemotron-4 and Minitron (arXiv 2402.16819): LayerNorms that multiply by 1 + weight, a feed-forward of
squared ReLU, and rotation of half of a head's channels."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from kernels.layer_norm import layer_norm
from kernels.quantize_rows import Activations
from models.config import ConfigReader
from models.decoder import read_decoder_config
from models.families.jais2 import Jais2
from models.families.llama import LlamaConfig
from models.layers.linear import Linear
from models.layers.norm import LayerNorm
from models.layers.rotary import read_rotary_config


def read_config(config: ConfigReader) -> LlamaConfig:
    """Read config.json, with defaults as in transformers. `rms_norm_eps` is the epsilon of the LayerNorms.

    Raises UserError for missing, mistyped or unsupported values.
    """
    eps, read_rotary = config.positive("norm_eps", 1e-5), partial(read_rotary_config, partial_rotary_factor=0.5)
    shape = read_decoder_config(config, eps, 4096, read_rotary, activations=("relu2",))
    return LlamaConfig(
        **vars(shape) | {"rms_norm_eps": eps},
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


class LayerNorm1P(LayerNorm):
    """LayerNorm that multiplies by 1 + weight."""

    def forward(self, x: Tensor, readers: Sequence[Linear] = ()) -> Activations:  # type: ignore[override]
        return layer_norm(x, self.weight + 1.0, self.bias, self.eps)


class Nemotron(Jais2):
    layout = replace(Jais2.layout, norm_weight_offset=1.0)
    norm = LayerNorm1P
