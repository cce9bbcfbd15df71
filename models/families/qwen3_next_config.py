"""Read config.json of Qwen3-Next and of the models with its layers."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from models.config import ConfigReader
from models.decoder import RecurrentConfig, read_decoder_config
from models.layers.gated_delta import DeltaHeads
from models.layers.layer_types import FULL, LINEAR, check_layer_types, read_num_taps
from models.layers.moe import MixtureConfig, read_mixture
from models.layers.rotary import read_rotary_config


@dataclass(frozen=True)
class HybridConfig(RecurrentConfig):
    norm_weight_offset: ClassVar[float | None] = 1.0
    heads: DeltaHeads
    """Of the recurrent layers."""
    num_taps: int
    """The tokens that a convolution reads, with the token itself."""


@dataclass(frozen=True)
class HybridMoeConfig(HybridConfig):
    mixture: MixtureConfig
    shared_expert_intermediate_size: int

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return self.mixture.sparse_layers[: self.num_hidden_layers]


def read_mixtures(config: ConfigReader) -> HybridMoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values, and for contradicting kinds of layers.
    """
    shape = read_hybrid(config, intermediate_size=config.count("moe_intermediate_size"))
    mixture = read_mixture(config, shape.num_hidden_layers, norm_topk_prob=True)
    return HybridMoeConfig(
        **vars(shape),
        mixture=mixture,
        shared_expert_intermediate_size=config.count("shared_expert_intermediate_size"),
    )


def read_hybrid(config: ConfigReader, intermediate_size: int | None = None) -> HybridConfig:
    """Read the keys of all layers except the experts. Raises UserError as `read_mixtures` does.

    `intermediate_size`: the default of a model whose layers are all mixtures.
    """
    for key, supported in (
        ("attention_bias", (False, None)),
        ("attn_output_gate", (True, None)),
        ("output_gate_type", ("swish", "silu", None)),
        ("mamba_ssm_dtype", ("float32", None)),
        ("use_sliding_window", (False, None)),
    ):
        config.expect(key, supported, None)
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        config.raw(key)  # of the multi-token prediction layer, which is not loaded
    config.count("head_dim")  # transformers defaults to 256
    read_rotary = partial(read_rotary_config, partial_rotary_factor=0.25)
    shape = read_decoder_config(config, 1e-6, read_rotary=read_rotary, intermediate_size=intermediate_size)
    values, keys = config.count("linear_num_value_heads"), config.count("linear_num_key_heads")
    config.check_multiple("linear_num_value_heads", values, "linear_num_key_heads", keys)
    key_channels, value_channels = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    types, interval = config.raw("layer_types"), config.count("full_attention_interval", 4)
    if types is None:
        types = [LINEAR if (i + 1) % interval else FULL for i in range(shape.num_hidden_layers)]
    return HybridConfig(
        **vars(shape),
        heads=DeltaHeads(values, keys, key_channels, value_channels, values // keys),
        num_taps=read_num_taps(config, "linear_conv_kernel_dim"),
        is_recurrent=check_layer_types(types, LINEAR, shape.num_hidden_layers),
    )
