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
from models.decoder import DecoderLayer, DecoderLM, read_decoder_config
from models.families.mistral import MistralConfig
from models.layers.constant import Constant
from models.layers.mlp import MLP
from models.layers.rotary import Angles, RotaryConfig, read_rotary_config
from models.layers.sliding_window import read_window

MOST_STEPS = 2**16  # the maximum size of the table of query factors; the published model has 17 entries


@dataclass(frozen=True)
class Ministral3Config(MistralConfig):
    query_beta: float
    query_length: int
    """Queries are multiplied by 1 + query_beta * ln(1 + floor(position / query_length))."""


def read_config(config: ConfigReader) -> Ministral3Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    scaling = _scaling(config)
    shape = read_decoder_config(config, read_rotary=_read_rotary)
    length = scaling.count("original_max_position_embeddings")
    if shape.context_length // length > MOST_STEPS:
        raise UserError(
            f"config.json: rope_parameters: original_max_position_embeddings={length} is less than 1 / {MOST_STEPS} of the context, "
            f"{shape.context_length}"
        )
    return Ministral3Config(
        **vars(shape),
        sliding_window=read_window(config),
        query_beta=scaling.require("llama_4_scaling_beta", float) and scaling.positive("llama_4_scaling_beta"),
        query_length=length,
    )


def _read_rotary(config: ConfigReader, head_dim: int, max_position_embeddings: int) -> RotaryConfig:
    """Read the rotary settings without the query scaling and the copy of the context length."""
    scaling = _scaling(config)
    scaling.expect("max_position_embeddings", (max_position_embeddings, None), None)
    ministral_keys = ("llama_4_scaling_beta", "max_position_embeddings")
    rope_parameters = {key: value for key, value in scaling.values.items() if key not in ministral_keys}
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


class Attention(decoder.Attention):
    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, inputs: Any, batch: Batch, cache: LayerCache
    ) -> Tensor:
        factors: Tensor = inputs.query_factors
        return super().turn_and_store(query, key, value, inputs.angles, batch, cache) * factors


class Ministral3(DecoderLM):
    config: Ministral3Config

    def __init__(self, c: Ministral3Config) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(c, Attention(c, c.sliding_window), MLP(c.hidden_size, c.intermediate_size))
                for _ in range(c.num_hidden_layers)
            ),
        )
        steps = torch.arange(1, c.context_length // c.query_length + 2, device="cpu").float()
        # A table, because torch's log of a number can depend on its index in a tensor.
        self._query_factors = Constant(1 + c.query_beta * steps.log())

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Any]:
        (angles,) = super().layer_inputs(batch, dtype)
        assert angles is not None
        positions = batch.positions // self.config.query_length
        factors = self._query_factors.on(positions.device)[positions]  # [T]
        return (StepInputs(angles, factors.to(dtype)[:, None, None]),)
