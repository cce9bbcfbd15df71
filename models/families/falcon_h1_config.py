"""The config of Falcon-H1."""

from dataclasses import dataclass, replace

from conf.errors import UserError
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import DecoderConfig, read_decoder_config
from models.layers.mamba2 import Mamba2Config, read_mamba2


@dataclass(frozen=True)
class Multipliers:
    embedding: float
    logits: float
    attention_input: float
    key: float
    attention_output: float
    mamba_input: float
    mamba_sections: tuple[float, ...]
    """Of in_proj's outputs gate, x, B, C and dt."""
    mamba_output: float
    mlp_gate: float
    mlp_output: float


@dataclass(frozen=True)
class FalconH1Config(DecoderConfig):
    mamba: Mamba2Config
    has_norm: bool
    """Whether Mamba-2 has a norm."""
    norm_before_gate: bool
    """Whether the norm reads the heads' outputs instead of their product with the gate."""
    multipliers: Multipliers
    attention_bias: bool
    mlp_bias: bool

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, is_recurrent=True)

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        return (True,) * self.num_hidden_layers


def read_config(config: ConfigReader) -> FalconH1Config:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    shape = read_decoder_config(config, 1e-5, 8192)
    config.expect("attn_layer_indices", (None,), None)  # every layer has all parts
    config.expect("mamba_use_mlp", (True, None), None)
    for key in ("layer_types", "layers_block_type"):
        config.expect(key, (["hybrid"] * shape.num_hidden_layers, None), None)
    for key in ("num_logits_to_keep", "mlp_expansion_factor"):
        config.raw(key)
    mamba = read_mamba2(config, shape.hidden_size, shape.rms_norm_eps)
    return FalconH1Config(
        **vars(shape),
        mamba=replace(mamba, has_output_bias=config.get("projectors_bias", bool, False)),
        has_norm=config.get("mamba_rms_norm", bool, False),
        norm_before_gate=config.get("mamba_norm_before_gate", bool, True),
        multipliers=_read_multipliers(config),
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


def _read_multipliers(config: ConfigReader) -> Multipliers:
    gate, output = _factors(config, "mlp_multipliers", 2)
    return Multipliers(
        embedding=config.positive("embedding_multiplier", 1.0),
        logits=config.positive("lm_head_multiplier", 1.0),
        attention_input=config.positive("attention_in_multiplier", 1.0),
        key=config.positive("key_multiplier", 1.0),
        attention_output=config.positive("attention_out_multiplier", 1.0),
        mamba_input=config.positive("ssm_in_multiplier", 1.0),
        mamba_sections=_factors(config, "ssm_multipliers", 5),
        mamba_output=config.positive("ssm_out_multiplier", 1.0),
        mlp_gate=gate,
        mlp_output=output,
    )


def _factors(config: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """Read a list of factors, by default ones. Raises UserError unless it is a list of `count` positive numbers."""
    values = config.raw(key)
    if values is None:
        return (1.0,) * count
    are_numbers = isinstance(values, list) and all(type(value) in (int, float) and value > 0 for value in values)
    if not are_numbers or len(values) != count:
        raise UserError(f"config.json: {key}={values!r} is not a list of {count} positive numbers")
    return tuple(map(float, values))
