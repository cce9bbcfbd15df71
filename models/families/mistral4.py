"""Mistral Small 4: DeepSeek-V3's decoder with softmax routing, and with queries that grow with their position.

T tokens, H query heads, L channels of the latent, P channels with position of a head.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader
from models.families import deepseek
from models.families.deepseek import Deepseek
from models.families.deepseek_config import DeepseekConfig, read_latent_decoder
from models.families.ministral3 import GrowingRotary, QueryGrowth, read_growth, read_rotary
from models.layers.grouped_moe import Routing, read_routing


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(DeepseekConfig):
    growth: QueryGrowth


@dataclass(frozen=True)
class SoftmaxRouting(Routing):
    """Scores are a softmax, and a group's score is the sum of its best two experts."""

    @property
    def num_scored(self) -> int:
        return 2


def read_config(config: ConfigReader) -> Mistral4Config:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    groups = config.count("n_group", 1), config.count("topk_group", 1)
    routing = read_routing(config, groups, False, config.get("norm_topk_prob", bool, True))
    if routing.topk_group < routing.n_group and routing.num_experts < 2 * routing.n_group:
        raise UserError(
            f"config.json: n_group={routing.n_group} leaves 1 expert to a group, which needs 2 to be scored"
        )
    rope_dim = config.count("qk_rope_head_dim")
    share = rope_dim / (config.count("qk_nope_head_dim") + rope_dim)
    shape = read_latent_decoder(
        config,
        SoftmaxRouting(**vars(routing)),
        config.get("rope_interleave", bool, True),
        partial(read_rotary, partial_rotary_factor=share),
    )
    return Mistral4Config(**vars(shape), growth=read_growth(config, shape.context_length))


class Attention(deepseek.Attention):
    def rotate(self, part: Tensor, angles: Any) -> Tensor:
        return super().rotate(part, angles.angles)

    def scale(self, query: Tensor, angles: Any) -> Tensor:
        factors: Tensor = angles.query_factors
        return query * factors


class Mistral4(Deepseek):
    attention = Attention

    def __init__(self, c: Mistral4Config) -> None:
        super().__init__(c, GrowingRotary(c.rotary, c.growth))
