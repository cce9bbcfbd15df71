"""Ministral 3: Mistral with yarn, and with queries that grow with their position.

T tokens, H query heads, D channels per head.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.errors import UserError
from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderLayer, PreNormLM, read_decoder_config
from models.families.mistral import MistralConfig
from models.layers.constant import Constant
from models.layers.mlp import MLP
from models.layers.rotary import Angles, RotaryConfig, RotaryEmbedding, read_rotary_config
from models.layers.sliding_window import read_window

MOST_STEPS = 2**16  # the maximum size of the table of query factors; the published model has 17 entries


@dataclass(frozen=True)
class QueryGrowth:
    """Queries are multiplied by 1 + beta * ln(1 + floor((position + offset) / length))."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True)
class Ministral3Config(MistralConfig):
    growth: QueryGrowth


def read_config(config: ConfigReader) -> Ministral3Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    shape = read_decoder_config(config, read_rotary=read_rotary)
    growth = read_growth(config, shape.context_length)
    return Ministral3Config(**vars(shape), sliding_window=read_window(config), growth=growth)


def read_growth(config: ConfigReader, context_length: int) -> QueryGrowth:
    """Read the growth of the queries. Raises UserError if its table would be too large."""
    scaling = _scaling(config)
    length = read_length(scaling, "original_max_position_embeddings", None, context_length)
    key = "llama_4_scaling_beta"
    return QueryGrowth(scaling.require(key, float) and scaling.positive(key), length)


def read_length(config: ConfigReader, key: str, default: int | None, context_length: int) -> int:
    """Read the length of `QueryGrowth`. Raises UserError if its table would be too large."""
    length = config.count(key, default)
    if context_length // length > MOST_STEPS:
        raise UserError(f"config.json: {key}={length} is less than 1 / {MOST_STEPS} of the context, {context_length}")
    return length


def read_rotary(
    config: ConfigReader, head_dim: int, max_position_embeddings: int, partial_rotary_factor: float | None = None
) -> RotaryConfig:
    """Read the rotary settings without the query scaling, the copy of the context length, and the share of a head's
    channels that `head_dim` already counts, `partial_rotary_factor`."""
    scaling = _scaling(config)
    scaling.expect("max_position_embeddings", (max_position_embeddings, None), None)
    scaling.expect("partial_rotary_factor", (partial_rotary_factor, None), None)
    own_keys = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
    rope_parameters = {key: value for key, value in scaling.values.items() if key not in own_keys}
    outer = {key: config.raw(key) for key in ("rope_theta", "rope_scaling")}
    reader = ConfigReader(outer | {"rope_parameters": rope_parameters}, "config.json")
    return read_rotary_config(reader, head_dim, max_position_embeddings)


def _scaling(config: ConfigReader) -> ConfigReader:
    section = config.section("rope_parameters")
    if section is None:
        raise UserError("config.json: rope_parameters is missing")
    return section


class StepInputs(NamedTuple):
    """The tensors of a step that all layers share."""

    angles: Angles
    query_factors: Tensor
    """[T, 1, 1] in the model's dtype."""


class GrowingRotary:
    """Computes the angles and the query factors of each token."""

    def __init__(self, rotary: RotaryConfig, growth: QueryGrowth) -> None:
        self._rotary, self._growth = RotaryEmbedding(rotary), growth
        last = (rotary.context_length + growth.offset) // growth.length
        steps = torch.arange(1, last + 2, device="cpu").float()
        # A table, because torch's log of a number can depend on its index in a tensor.
        self._factors = Constant(1 + growth.beta * steps.log())

    def angles(self, positions: Tensor, prompt_lengths: Tensor, dtype: torch.dtype) -> StepInputs:
        steps = (positions + self._growth.offset) // self._growth.length
        factors = self._factors.on(positions.device)[steps]  # [T]
        return StepInputs(self._rotary.angles(positions, prompt_lengths, dtype), factors.to(dtype)[:, None, None])


class Attention(decoder.Attention):
    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, inputs: Any, batch: Batch, cache: LayerCache
    ) -> Tensor:
        factors: Tensor = inputs.query_factors
        return super().turn_and_store(query, key, value, inputs.angles, batch, cache) * factors


class Ministral3(PreNormLM):
    def __init__(self, c: Ministral3Config) -> None:
        layers = (
            DecoderLayer(c, Attention(c, c.sliding_window), MLP(c.hidden_size, c.intermediate_size))
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, GrowingRotary(c.rotary, c.growth))
