"""Read checkpoints in AutoRound's own form: the tensors of GPTQ or AWQ, with other settings.

Source: auto-round 0.16, export/export_to_autoround/export.py.
"""

import re

from conf.errors import UserError
from models.config import ConfigReader
from quantization.layouts.awq import Awq
from quantization.layouts.checks import check_autoround
from quantization.layouts.gptq import Gptq, read_format
from quantization.layouts.patterns import compile_pattern
from quantization.weight_format import WeightFormat

METHOD = "auto-round"
GPTQ_V1, AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
GPTQ_V2 = "auto_round", "auto_round:exllamav2", "auto_round:gptqmodel"
FLOAT_BITS = 16
NAME = re.compile(r"[\w.-]+")


def read_autoround(config: ConfigReader) -> Gptq | Awq:
    """Read the `quantization_config`.

    `extra_config` has the settings of layers that differ: by names or their ends, or by regular expressions that match
    a part of the name. Raises UserError for other packings, bit widths and number formats.
    """
    packing = config.expect("packing_format", (GPTQ_V1, AWQ, *GPTQ_V2), GPTQ_V1)
    for key in ("quant_method", "block_name_to_quantize", "backend"):
        config.raw(key)
    default, layers = read_format(config, None), config.section("extra_config")
    check_autoround(config)
    rules = tuple(_read_rule(layers, name, default) for name in sorted(layers.values, key=_is_regex)) if layers else ()
    if packing != AWQ:
        return Gptq(default, rules, packing == GPTQ_V1, act_order=False)
    if any(format not in (None, default) for _, format in rules) or default.bits != 4:
        raise UserError(f"quantization_config: packing_format={AWQ!r} is not supported with several formats or bits=8")
    return Awq(default)


def _is_regex(name: str) -> bool:
    return not NAME.fullmatch(name)


def _read_rule(layers: ConfigReader, name: str, default: WeightFormat) -> tuple[re.Pattern[str], WeightFormat | None]:
    layer = layers.section(name)
    pattern = compile_pattern(f".*(?:{name})" if _is_regex(name) else rf"(.*\.)?{re.escape(name)}$")
    if layer is None:
        return pattern, default
    if layer.get("bits", int, default.bits) >= FLOAT_BITS:
        return pattern, None
    format = read_format(layer, default)
    check_autoround(layer)
    if unread := layer.unread():
        raise UserError(f"quantization_config: extra_config: {name!r} has unknown settings: {', '.join(unread)}")
    return pattern, format
