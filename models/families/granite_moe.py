"""Granite 3 with mixtures of experts, also with a shared feed-forward part."""

from dataclasses import dataclass, replace

from torch import nn

from conf.errors import UserError
from models.config import ConfigReader
from models.families import granite
from models.families.granite import Attention, GraniteLM
from models.families.granite_hybrid import SharedMLP
from models.families.granite_mixture import JOINED, GraniteMixture
from models.layers.rotary import RotaryEmbedding
from models.layout import HEADS, ModelLayout, Unit


@dataclass(frozen=True)
class GraniteMoeConfig(granite.GraniteConfig):
    num_experts: int
    num_experts_per_tok: int
    shared_intermediate_size: int
    """0: no layer has a shared part."""


def read_config(config: ConfigReader) -> GraniteMoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    experts, chosen = config.count("num_local_experts", 8), config.count("num_experts_per_tok", 2)
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than num_local_experts={experts}")
    shared = config.get("shared_intermediate_size", int, 0)
    return GraniteMoeConfig(
        **vars(granite.read_config(config)),
        num_experts=experts,
        num_experts_per_tok=chosen,
        shared_intermediate_size=config.count("shared_intermediate_size") if shared else 0,
    )


class DecoderLayer(granite.DecoderLayer):
    def __init__(self, c: GraniteMoeConfig) -> None:
        sizes = c.hidden_size, c.intermediate_size, c.num_experts, c.num_experts_per_tok
        mlps: dict[str, nn.Module] = {"block_sparse_moe": GraniteMixture(*sizes)}
        if c.shared_intermediate_size:
            mlps["shared_mlp"] = SharedMLP(c.hidden_size, c.shared_intermediate_size)
        self.names = ("input_layernorm", "self_attn", "post_attention_layernorm", *mlps)
        super().__init__(c, Attention(c, c.multipliers.attention, c.attention_bias), *mlps.values())


class GraniteMoe(GraniteLM):
    layout = ModelLayout(replicated=("layer",), joined_experts=JOINED)

    def __init__(self, c: GraniteMoeConfig) -> None:
        layers = (DecoderLayer(c) for _ in range(c.num_hidden_layers))
        super().__init__(c, c.multipliers, layers, RotaryEmbedding(c.rotary))


class GraniteMoeShared(GraniteMoe):
    layout = replace(
        GraniteMoe.layout,
        row_parallel=("o_proj", "output_linear", "down_proj"),
        units={**HEADS, "input_linear": (Unit.CHANNEL, Unit.CHANNEL)},
    )
