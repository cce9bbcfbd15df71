"""Hunyuan v1 A13B: Hunyuan's dense model with mixtures of experts and a shared feed-forward part in every layer.

T tokens, E hidden channels, N experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from conf.errors import UserError
from kernels.moe import route
from models.batch import Batch
from models.config import ConfigReader
from models.decoder import DecoderLayer, DecoderLM
from models.families import hunyuan_v1_dense
from models.families.hunyuan_v1_dense import Attention
from models.families.llama import LlamaConfig
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.moe import Experts, Router
from models.layers.named_parts import NamedParts

UNUSED = ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "n_group", "topk_group")
"""Keys in the hub's files for training and for other models of the same code."""
SUPPORTED = {
    "moe_layer_num_skipped": (0, None),
    "norm_topk_prob": (True, None),
    "routed_scaling_factor": (1, None),
    "use_mixed_mlp_moe": (True, None),
}


@dataclass(frozen=True)
class HunyuanMoeConfig(LlamaConfig):
    num_experts: tuple[int, ...]
    """For each layer."""
    num_experts_per_tok: tuple[int, ...]
    """For each layer."""

    @property
    def layer_kinds(self) -> tuple[tuple[int, int], ...]:
        """The numbers of experts and of chosen experts of each layer."""
        kinds = zip(self.num_experts, self.num_experts_per_tok, strict=True)
        return (*kinds,)[: self.num_hidden_layers]


def read_config(config: ConfigReader) -> HunyuanMoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    for key, values in SUPPORTED.items():
        config.expect(key, values, None)
    for key in UNUSED:
        config.raw(key)
    shape = hunyuan_v1_dense.read_config(config)
    num_layers = shape.num_hidden_layers
    for key, supported in (("moe_intermediate_size", shape.intermediate_size), ("num_shared_expert", 1)):
        config.expect(key, (None, supported, [supported] * num_layers), None)
    experts, chosen = (read_counts(config, key, num_layers) for key in ("num_experts", "moe_topk"))
    for layer, (number, limit) in enumerate(zip(chosen, experts, strict=True)):
        if number > limit:
            raise UserError(f"config.json: moe_topk={number} is more than num_experts={limit} in layer {layer}")
    return HunyuanMoeConfig(**vars(shape), num_experts=experts, num_experts_per_tok=chosen)


def read_counts(config: ConfigReader, key: str, num_layers: int) -> tuple[int, ...]:
    """Return a size for each layer, from a number for all layers or from a list."""
    values = config.raw(key, 1)
    if not isinstance(values, list):
        return (config.count(key, 1),) * num_layers
    if len(values) != num_layers:
        raise UserError(f"config.json: {key}={values!r} is not a list of num_hidden_layers={num_layers} numbers")
    return tuple(ConfigReader({key: value}, "config.json").count(key) for value in values)


class Gate(NamedParts):
    names = ("wg",)


class MoE(Module):
    """A router and its experts, whose weights sum to 1 for each token, and a feed-forward part for all tokens."""

    readers: Sequence[Linear] = ()
    """As of `SparseMoeBlock`."""

    def __init__(self, c: LlamaConfig, num_experts: int, num_experts_per_tok: int) -> None:
        super().__init__()
        self.gate = Gate(Router(c.hidden_size, num_experts))
        experts = (MLP(c.hidden_size, c.intermediate_size) for _ in range(num_experts))
        self.experts = Experts(experts, num_experts_per_tok)
        self.shared_mlp = MLP(c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        """x and the result are [T, E]."""
        logits = self.gate.parts[0].logits(x)  # [T, N]
        routed: Tensor = self.experts(x, *route(logits, self.experts.num_experts_per_tok, True))
        return routed + self.shared_mlp(x, batch)


class HunyuanMoe(DecoderLM):
    float32_tensors = ("mlp.gate.wg.weight",)

    def __init__(self, c: HunyuanMoeConfig) -> None:
        super().__init__(c, (DecoderLayer(c, Attention(c), MoE(c, *sizes)) for sizes in c.layer_kinds))
