"""Granite 4: most layers are Mamba-2, the others Granite's attention, with dense layers or mixtures of experts."""

from dataclasses import dataclass

from torch import nn

from conf.errors import UserError
from models import decoder
from models.config import ConfigReader
from models.decoder import RecurrentConfig, read_decoder_config
from models.families import granite
from models.families.granite import GraniteLM, Multipliers, read_multipliers
from models.families.granite_mixture import JOINED, GraniteMixture
from models.layers.layer_types import LINEAR, agreed_types, check_layer_types, renamed_types
from models.layers.mamba2 import Mamba2, Mamba2Config, read_mamba2
from models.layers.mlp import FusedMLP
from models.layers.rotary import RotaryEmbedding
from models.layout import HEADS, ModelLayout, Unit


@dataclass(frozen=True)
class GraniteHybridConfig(RecurrentConfig):
    multipliers: Multipliers
    mamba: Mamba2Config
    attention_bias: bool
    has_rotary: bool
    shared_intermediate_size: int
    num_experts: int
    """0: the layers are dense."""
    num_experts_per_tok: int

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return (self.num_experts > 0,) * self.num_hidden_layers


def read_config(config: ConfigReader) -> GraniteHybridConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values, and for contradicting kinds of layers.
    """
    shape = read_decoder_config(config, 1e-6, 2048)
    keys = "layer_types", "layers_block_type"
    types, others = (renamed_types(config.raw(key)) for key in keys)
    types = agreed_types(config, keys[0], types, keys[1], others)
    experts, chosen = _read_experts(config)
    config.expect("normalization_function", ("rmsnorm", None), None)
    position_type = config.expect("position_embedding_type", ("rope", "nope", None), None)
    return GraniteHybridConfig(
        **vars(shape),
        is_recurrent=check_layer_types(types, LINEAR, shape.num_hidden_layers),
        multipliers=read_multipliers(config),
        mamba=read_mamba2(config, shape.hidden_size, shape.rms_norm_eps),
        attention_bias=config.get("attention_bias", bool, False),
        has_rotary=position_type == "rope",
        shared_intermediate_size=config.count("shared_intermediate_size", 1024),
        num_experts=experts,
        num_experts_per_tok=chosen,
    )


def _read_experts(config: ConfigReader) -> tuple[int, int]:
    """Return the numbers of experts and of a token's experts."""
    if config.raw("num_local_experts") == 0:
        config.raw("num_experts_per_tok")
        return 0, 0
    experts, chosen = config.count("num_local_experts", 8), config.count("num_experts_per_tok", 2)
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than num_local_experts={experts}")
    return experts, chosen


class NoPEAttention(granite.Attention):
    turn_and_store = decoder.NoPEAttention.turn_and_store


class SharedMLP(FusedMLP):
    names = ("input_linear", "output_linear")


class HybridLayer(granite.DecoderLayer):
    def __init__(self, c: GraniteHybridConfig, mixer: nn.Module) -> None:
        mlps: dict[str, nn.Module] = {"shared_mlp": SharedMLP(c.hidden_size, c.shared_intermediate_size)}
        if c.num_experts:
            sizes = c.hidden_size, c.intermediate_size, c.num_experts, c.num_experts_per_tok
            mlps = {"block_sparse_moe": GraniteMixture(*sizes), **mlps}
        mixer_name = "mamba" if isinstance(mixer, Mamba2) else "self_attn"
        self.names = ("input_layernorm", mixer_name, "post_attention_layernorm", *mlps)
        super().__init__(c, mixer, *mlps.values())


def make_attention(c: GraniteHybridConfig) -> granite.Attention:
    attention = granite.Attention if c.has_rotary else NoPEAttention
    return attention(c, c.multipliers.attention, c.attention_bias)


class GraniteHybrid(GraniteLM):
    layout = ModelLayout(
        recurrent="mamba",
        scale_fold_targets={"down_proj": "up_proj", "o_proj": "v_proj"},
        row_parallel=("o_proj", "out_proj", "output_linear", "down_proj"),
        replicated=("layer",),
        units={**HEADS, "input_linear": (Unit.CHANNEL, Unit.CHANNEL)},
        joined_experts=JOINED,
    )
    float32_tensors = ("A_log", "dt_bias", "mamba.D")

    def __init__(self, c: GraniteHybridConfig) -> None:
        layers = (
            HybridLayer(c, Mamba2(c.hidden_size, c.mamba) if is_recurrent else make_attention(c))
            for is_recurrent in c.recurrent_layers
        )
        super().__init__(c, c.multipliers, layers, RotaryEmbedding(c.rotary) if c.has_rotary else None)
