"""gpt-oss's MXFP4 experts (OCP microscaling), in the terms of compressed-tensors.

joined_experts.py gives each expert the tensors of this layout.
"""

from typing import Any

from conf.errors import UserError

SETTINGS = ("quant_method", "modules_to_not_convert", "dequantize")  # the files say which tensors have blocks
BLOCK = 32  # numbers that share a scale
PACKED_EXPERTS = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "experts": {
            "targets": [r"re:.*\.experts\.\d+\."],
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True},
        }
    },
}


def packed_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with a quantization_config of compressed-tensors in place of gpt-oss's own.

    Raises UserError for a setting that is not known.
    """
    settings = values.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != "mxfp4":
        return values
    if unknown := [key for key in settings if key not in SETTINGS]:
        raise UserError(f"quantization_config: {unknown[0]} is not known for quant_method='mxfp4'")
    return values | {"quantization_config": PACKED_EXPERTS}
