"""Nemotron 3 8B, Nemotron-4 and Minitron (arXiv 2402.16819): LayerNorms that multiply by 1 + weight, a feed-forward of
squared ReLU, and rotation of half of a head's channels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kernels.layer_norm import layer_norm
from kernels.quantize_rows import Activations
from models.config import ConfigReader
from models.decoder import Attention, read_decoder_config
from models.families.llama import LlamaConfig
from models.layer_norm_decoder import LayerNormLM, SequentialLayer
from models.layers.linear import Linear
from models.layers.mlp import SquaredReluMLP
from models.layers.norm import LayerNorm
from models.layers.rotary import read_rotary_config
from models.layout import ModelLayout


@dataclass(frozen=True)
class NemotronConfig(LlamaConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""


def read_config(config: ConfigReader) -> NemotronConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    eps, read_rotary = config.positive("norm_eps", 1e-5), partial(read_rotary_config, partial_rotary_factor=0.5)
    shape = read_decoder_config(config, eps, 4096, read_rotary, activations=("relu2",))
    return NemotronConfig(
        **vars(shape) | {"rms_norm_eps": eps},
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


class LayerNorm1P(LayerNorm):
    """LayerNorm that multiplies by 1 + weight."""

    def forward(self, x: Tensor, readers: Sequence[Linear] = ()) -> Activations:  # type: ignore[override]
        return layer_norm(x, self.weight + 1.0, self.bias, self.eps)


class Nemotron(LayerNormLM):
    layout = ModelLayout(norm_weight_offset=1.0, scale_fold_targets={"o_proj": "v_proj"})

    def __init__(self, c: NemotronConfig) -> None:
        layers = (
            SequentialLayer(
                (_norm(c), _norm(c)),
                Attention(c, None, c.attention_bias, c.attention_bias),
                SquaredReluMLP(c.hidden_size, c.intermediate_size, c.mlp_bias),
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, _norm(c))


def _norm(c: NemotronConfig) -> LayerNorm1P:
    return LayerNorm1P(c.hidden_size, c.rms_norm_eps)
