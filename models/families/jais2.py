"""Jais 2: LayerNorms with bias and a feed-forward of squared ReLU."""

from typing import ClassVar

from models.config import ConfigReader
from models.decoder import Attention, read_decoder_config
from models.families.llama import LlamaConfig
from models.layer_norm_decoder import RotaryLayerNormLM, SequentialLayer
from models.layers.mlp import SquaredReluMLP
from models.layers.norm import LayerNorm
from models.layout import ModelLayout


def read_config(config: ConfigReader) -> LlamaConfig:
    """Read config.json, with defaults as in transformers. `rms_norm_eps` is the epsilon of the LayerNorms.

    Raises UserError for missing, mistyped or unsupported values.
    """
    eps = config.positive("layer_norm_eps", 1e-5)
    return LlamaConfig(
        **vars(read_decoder_config(config, eps, 8192, activations=("relu2",))) | {"rms_norm_eps": eps},
        attention_bias=config.get("attention_bias", bool, True),
        mlp_bias=config.get("mlp_bias", bool, True),
    )


class Jais2(RotaryLayerNormLM):
    layout = ModelLayout(scale_fold_targets={"o_proj": "v_proj"})
    norm: ClassVar[type[LayerNorm]] = LayerNorm

    def __init__(self, c: LlamaConfig) -> None:
        layers = (
            SequentialLayer(
                (self._make_norm(c), self._make_norm(c)),
                Attention(c, None, c.attention_bias, c.attention_bias),
                SquaredReluMLP(c.hidden_size, c.intermediate_size, c.mlp_bias),
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, self._make_norm(c))

    def _make_norm(self, c: LlamaConfig) -> LayerNorm:
        return self.norm(c.hidden_size, c.rms_norm_eps)
