"""Gemma 1 and CodeGemma (arXiv 2403.08295): Llama with GELU, and norms that multiply by 1 + weight.

T tokens, E hidden channels.
"""

from dataclasses import dataclass
from typing import ClassVar

from models.batch import Batch
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.families.gemma2 import WEIGHT_OFFSET
from models.layers.mlp import GELUMLP
from models.layers.norm import ResidualStream
from models.layout import ModelLayout


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    norm_weight_offset: ClassVar = WEIGHT_OFFSET
    attention_bias: bool


def read_config(config: ConfigReader) -> GemmaConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    config.expect("hidden_activation", ("gelu_pytorch_tanh", None), None)
    config.expect("use_bidirectional_attention", (False, None), None)
    config.count("head_dim")  # transformers defaults to 256
    # the first files say gelu, but the model was trained with its approximation by tanh
    shape = read_decoder_config(config, 1e-6, 8192, activations=("gelu_pytorch_tanh", "gelu"))
    return GemmaConfig(
        **vars(shape) | {"tie_word_embeddings": config.get("tie_word_embeddings", bool, True)},
        attention_bias=config.get("attention_bias", bool, False),
    )


class Gemma(DecoderLM):
    config: GemmaConfig
    layout = ModelLayout(norm_weight_offset=WEIGHT_OFFSET)

    def __init__(self, c: GemmaConfig) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c,
                    Attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias),
                    GELUMLP(c.hidden_size, c.intermediate_size),
                )
                for _ in range(c.num_hidden_layers)
            ),
        )

    def embed(self, batch: Batch) -> ResidualStream:
        x = self.embedding(batch.token_ids)
        return ResidualStream(x * x.new_full((), self.config.hidden_size**0.5))  # rounded as in `gemma2.Gemma.embed`
