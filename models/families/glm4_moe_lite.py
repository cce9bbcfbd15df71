"""GLM-4.7-Flash: DeepSeek-V3 with an optional list of the dense layers."""

from dataclasses import replace

from conf.errors import UserError
from models.config import ConfigReader
from models.families.deepseek_config import DeepseekConfig, read_config_v3


def read_config(config: ConfigReader) -> DeepseekConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.expect("partial_rotary_factor", (1, None), None)
    for key in ("rms_norm_eps", "routed_scaling_factor"):  # their defaults differ from DeepSeek-V3's
        config.positive(key)
    shape = read_config_v3(config)
    num_dense, types = config.get("first_k_dense_replace", int, 1), config.raw("mlp_layer_types")
    if types is not None:
        num_dense = types.count("dense") if isinstance(types, list) else 0
        if types != ["dense"] * num_dense + ["sparse"] * (shape.num_hidden_layers - num_dense):
            raise UserError(
                f"config.json: mlp_layer_types={types!r} is not {shape.num_hidden_layers} times 'dense' and then 'sparse'"
            )
    return replace(shape, first_k_dense_replace=num_dense)
