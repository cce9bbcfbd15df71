"""Arcee AFM: Llama with a feed-forward of squared ReLU, without gate."""

from models.config import ConfigReader
from models.decoder import Attention, DecoderLayer, DecoderLM, read_decoder_config
from models.families.llama import LlamaConfig
from models.layers.mlp import SquaredReluMLP
from models.layout import ModelLayout


def read_config(config: ConfigReader) -> LlamaConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    return LlamaConfig(
        **vars(read_decoder_config(config, 1e-5, 4096, activations=("relu2",))),
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


class Arcee(DecoderLM):
    layout = ModelLayout(scale_fold_targets={"o_proj": "v_proj"})

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias),
                    SquaredReluMLP(c.hidden_size, c.intermediate_size, c.mlp_bias),
                )
                for _ in range(c.num_hidden_layers)
            ),
        )
