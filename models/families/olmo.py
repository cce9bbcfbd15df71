"""OLMo 1 (arXiv 2402.00838): Llama with LayerNorms without weights, and with clipped queries, keys and values."""

from dataclasses import dataclass

from torch import Tensor

from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderConfig, read_decoder_config
from models.layer_norm_decoder import RotaryLayerNormLM, SequentialLayer
from models.layers.mlp import MLP
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles
from models.layout import ModelLayout

EPS = 1e-5  # transformers' constant


@dataclass(frozen=True)
class OlmoConfig(DecoderConfig):
    attention_bias: bool
    clip_qkv: float | None


def read_config(config: ConfigReader) -> OlmoConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    return OlmoConfig(
        **vars(read_decoder_config(config, EPS, 2048)),
        attention_bias=config.get("attention_bias", bool, False),
        clip_qkv=None if config.raw("clip_qkv") is None else config.positive("clip_qkv"),
    )


class Attention(decoder.Attention):
    def __init__(self, c: OlmoConfig) -> None:
        super().__init__(c, None, c.attention_bias, c.attention_bias)
        self._clip = c.clip_qkv

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        if self._clip is not None:
            query, key, value = (part.clamp(-self._clip, self._clip) for part in (query, key, value))
        return super().turn_and_store(query, key, value, angles, batch, cache)


class Olmo(RotaryLayerNormLM):
    layout = ModelLayout(norms=())

    def __init__(self, c: OlmoConfig) -> None:
        layers = (
            SequentialLayer((_norm(c), _norm(c)), Attention(c), MLP(c.hidden_size, c.intermediate_size))
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, _norm(c))


def _norm(c: OlmoConfig) -> LayerNorm:
    return LayerNorm(c.hidden_size, EPS, elementwise_affine=False)
