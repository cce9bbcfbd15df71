"""Bamba: most layers are Mamba-2, the others are Llama's attention, which rotates half of a head's channels."""

from dataclasses import dataclass
from functools import partial

from models.config import ConfigReader
from models.decoder import Attention, DecoderLayer, DecoderLM, RecurrentConfig, read_decoder_config
from models.layers.layer_types import LINEAR, check_layer_types, types_of_indices
from models.layers.mamba2 import Mamba2, Mamba2Config, read_mamba2
from models.layers.mlp import MLP
from models.layers.rotary import read_rotary_config
from models.layout import ModelLayout


@dataclass(frozen=True)
class BambaConfig(RecurrentConfig):
    mamba: Mamba2Config
    attention_bias: bool
    mlp_bias: bool


def read_config(config: ConfigReader) -> BambaConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    read_rotary = partial(read_rotary_config, partial_rotary_factor=0.5)
    shape = read_decoder_config(config, 1e-5, 262144, read_rotary)
    num_layers = shape.num_hidden_layers
    types = types_of_indices("attn_layer_indices", config.raw("attn_layer_indices", []), LINEAR, num_layers)
    for key in ("attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient"):  # transformers rotates half, too
        config.raw(key)
    return BambaConfig(
        **vars(shape),
        is_recurrent=check_layer_types(types, LINEAR, num_layers),
        mamba=read_mamba2(config, shape.hidden_size, shape.rms_norm_eps),
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


class AttentionLayer(DecoderLayer):
    names = ("input_layernorm", "self_attn", "pre_ff_layernorm", "feed_forward")


class MambaLayer(DecoderLayer):
    names = ("input_layernorm", "mamba", "pre_ff_layernorm", "feed_forward")


class Bamba(DecoderLM):
    layout = ModelLayout(
        final_norm="model.final_layernorm",
        recurrent="mamba",
        norms=("input_layernorm", "pre_ff_layernorm"),
        row_parallel=("o_proj", "out_proj", "down_proj"),
    )
    float32_tensors = ("A_log", "dt_bias", "mamba.D")

    def __init__(self, c: BambaConfig) -> None:
        super().__init__(c, (_make_layer(c, is_recurrent) for is_recurrent in c.recurrent_layers))


def _make_layer(c: BambaConfig, is_recurrent: bool) -> DecoderLayer:
    mlp = MLP(c.hidden_size, c.intermediate_size, c.mlp_bias)
    if is_recurrent:
        return MambaLayer(c, Mamba2(c.hidden_size, c.mamba), mlp)
    return AttentionLayer(c, Attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias), mlp)
