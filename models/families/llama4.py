"""The text models of Llama 4: layers with chunked attention and layers without rotation, and mixtures of experts that
scale their inputs.

T tokens, E hidden channels, H query heads, N experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.kv_store import kv_store, rope_and_store
from kernels.moe import route_corrected
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import Attention as DecoderAttention
from models.decoder import DecoderLayer, PreNormLM, WindowedConfig, read_decoder_config
from models.families.ministral3 import GrowingRotary, QueryGrowth, StepInputs, read_length
from models.families.smollm3 import read_turns
from models.layers.constant import Constant
from models.layers.layer_types import check_layer_types
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.moe import Experts
from models.layout import JoinedExperts, ModelLayout

CHUNKED = "chunked_attention"


@dataclass(frozen=True)
class Llama4Config(WindowedConfig):
    """A window is a chunk of tokens: a token attends only to its own chunk."""

    turns: tuple[bool, ...]
    """For each layer, whether it rotates queries and keys."""
    use_qk_norm: bool
    attention_bias: bool
    growth: QueryGrowth
    """Of the queries in layers without rotation."""
    moe_layers: tuple[bool, ...]
    """For each layer, whether it is a mixture of experts."""
    intermediate_size_mlp: int
    """The feed-forward channels of a layer without experts. `intermediate_size`: of an expert."""
    num_experts: int
    num_experts_per_tok: int

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return self.moe_layers[: self.num_hidden_layers]


def read_config(config: ConfigReader) -> Llama4Config:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    shape = read_decoder_config(config, 1e-5, 131072, theta=5e5)
    has_norm = config.get("use_qk_norm", bool, True)
    if has_norm:  # it undoes yarn's factor
        shape = replace(shape, rotary=replace(shape.rotary, attention_factor=1.0))
    layers = shape.num_hidden_layers
    turns = read_turns(config, layers)
    types = config.raw("layer_types")
    is_chunked = turns if types is None else check_layer_types(types, CHUNKED, layers)
    experts, chosen = config.count("num_local_experts", 16), config.count("num_experts_per_tok", 1)
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than num_local_experts={experts}")
    chunk = config.count("attention_chunk_size", 8192)
    if config.raw("attention_chunk_size", chunk) is None and any(is_chunked):
        raise UserError("config.json: attention_chunk_size=null leaves the layers with chunks no length: give a number")
    length, scale = read_length(config, "floor_scale", 8192, shape.context_length), config.get("attn_scale", float, 0.1)
    return Llama4Config(
        **vars(shape),
        turns=turns,
        windows=tuple(chunk if chunked else None for chunked in is_chunked),
        use_qk_norm=has_norm,
        attention_bias=config.get("attention_bias", bool, False),
        growth=QueryGrowth(scale if config.raw("attn_temperature_tuning", True) else 0.0, length, offset=1),
        moe_layers=_read_moe_layers(config, layers),
        intermediate_size_mlp=config.count("intermediate_size_mlp", 16384),
        num_experts=experts,
        num_experts_per_tok=chosen,
    )


def _read_moe_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    step, numbers = config.count("interleave_moe_layer_step", 1), config.raw("moe_layers")
    if numbers is None:
        return tuple(i % step == 0 for i in range(1, num_layers + 1))
    if not isinstance(numbers, list) or any(type(i) is not int or not 0 <= i < num_layers for i in numbers):
        raise UserError(f"config.json: moe_layers={numbers!r} is not a list of layers from 0 to {num_layers - 1}")
    return tuple(i in numbers for i in range(num_layers))


class Attention(DecoderAttention):
    def __init__(self, c: Llama4Config, turns: bool, chunk: int | None) -> None:
        super().__init__(c, None, c.attention_bias, c.attention_bias)
        self.chunk, self._turns, self._eps = chunk, turns, c.rms_norm_eps
        self._norm_weight = Constant(torch.ones(c.head_dim, device="cpu")) if c.use_qk_norm else None

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, inputs: Any, batch: Batch, cache: LayerCache
    ) -> Tensor:
        step: StepInputs = inputs
        if not self._turns:
            kv_store(key, value, *cache, batch.slots)
            return query * step.query_factors
        # The norm has no weight, so that it may come before the rotation, which keeps the length of a vector.
        weight = None if self._norm_weight is None else self._norm_weight.on(query.device).to(query.dtype)
        return rope_and_store(query, key, value, *step.angles, *cache, batch.slots, True, weight, weight, self._eps)


class Mixture(Module):
    """K of N experts per token, whose inputs are multiplied by sigmoid scores, and an expert for all tokens."""

    readers: Sequence[Linear] = ()
    """Empty, because router and experts read floats."""

    def __init__(self, c: Llama4Config) -> None:
        super().__init__()
        self.router = Linear(c.hidden_size, c.num_experts, bias=False, is_quantizable=False)
        experts = (MLP(c.hidden_size, c.intermediate_size) for _ in range(c.num_experts))
        self.experts = Experts(experts, c.num_experts_per_tok)
        self.shared_expert = MLP(c.hidden_size, c.intermediate_size)
        self._no_bias = Constant(torch.zeros(c.num_experts, device="cpu"))

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        """x and the result are [T, E]."""
        num_chosen, no_bias = self.experts.num_experts_per_tok, self._no_bias.on(x.device)
        scores, chosen = route_corrected(self.router(x, batch).float(), no_bias, num_chosen, False)  # [T, K] each
        result: Tensor = self.shared_expert(x, batch)
        unweighted = scores.new_full((x.shape[0], 1), 1.0)
        scores = scores.to(x.dtype)
        # An exported graph takes the router's own output only. The published models choose one expert per token.
        pairs = [(scores, chosen)] if num_chosen == 1 else zip(scores.split(1, 1), chosen.split(1, 1), strict=True)
        for score, expert in pairs:
            result = result + self.experts(x * score, unweighted, expert)
        return result


class Layer(DecoderLayer):
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "feed_forward")


class Llama4(PreNormLM):
    layout = ModelLayout(replicated=("router",), joined_experts=JoinedExperts(inputs_first=True))

    def __init__(self, c: Llama4Config) -> None:
        def feed_forward(is_mixture: bool) -> nn.Module:
            return Mixture(c) if is_mixture else MLP(c.hidden_size, c.intermediate_size_mlp)

        # a planner's model has only the first layers
        parts = zip(c.turns, c.windows, c.layer_kinds, strict=False)
        layers = (Layer(c, Attention(c, turns, chunk), feed_forward(mix)) for turns, chunk, mix in parts)
        super().__init__(c, layers, GrowingRotary(c.rotary, c.growth))
