"""OLMoE (arXiv 2409.02060): mixtures of experts, and a norm over all queries of a token and over all its keys.

T tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader
from models.decoder import DecoderLayer, DecoderLM, read_decoder_config
from models.families import olmo2
from models.layers.moe import MixtureConfig, SparseMoeBlock
from models.layout import ModelLayout


@dataclass(frozen=True)
class OlmoeConfig(olmo2.Olmo2Config):
    clip_qkv: float | None
    mixture: MixtureConfig


def read_config(config: ConfigReader) -> OlmoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    key = "num_experts" if config.raw("num_local_experts") is None else "num_local_experts"
    experts, chosen = config.count(key, 64), config.count("num_experts_per_tok", 8)
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than {key}={experts}")
    shape = read_decoder_config(config, 1e-5, 4096)
    mixture = MixtureConfig(
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=shape.intermediate_size,
        norm_topk_prob=config.get("norm_topk_prob", bool, False),
        sparse_layers=(True,) * shape.num_hidden_layers,
    )
    return OlmoeConfig(
        **vars(shape),
        attention_bias=config.get("attention_bias", bool, False),
        clip_qkv=None if config.raw("clip_qkv") is None else config.positive("clip_qkv"),
        mixture=mixture,
    )


class Attention(olmo2.Attention):
    norm_weight_offset = None

    def __init__(self, c: OlmoeConfig) -> None:
        super().__init__(c)
        self._clip = c.clip_qkv

    def normed(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = super().normed(query, key, value)
        if self._clip is None:
            return parts
        query, key, value = (part.clamp(-self._clip, self._clip) for part in parts)
        return query, key, value


class Olmoe(DecoderLM):
    layout = ModelLayout(replicated=("gate", "q_proj", "k_proj"))

    def __init__(self, c: OlmoeConfig) -> None:
        layers = (
            DecoderLayer(c, Attention(c), SparseMoeBlock(c.hidden_size, c.mixture)) for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers)
