"""llama.cpp's mixtures of block types as options of single layers."""

from collections import Counter
from dataclasses import replace

from conf.errors import UserError
from conf.quantization import MIXTURES, QuantConfig
from models.causal_lm import CausalLM
from models.formats.gguf.config_writer import WRITERS
from models.formats.gguf.file_types import tensor_types
from models.formats.gguf.layouts import layout_of
from models.linear_layers import linear_specs

OVERRIDES = {"Q4_0": "int4/32", "F16": "none"}  # by ggml type; other types have their own names in lower case


def resolve_mixture(config: QuantConfig, model: CausalLM, model_type: str) -> QuantConfig:
    """Return the options with a mixture replaced by its most frequent type and an override for each other layer.

    Each tensor has the type that llama-quantize gives it. The given overrides come last, so that they
    win. Raises UserError for an architecture that llama.cpp does not have.
    """
    if config.scheme not in MIXTURES:
        return config
    name, most = config.scheme.name, MIXTURES[config.scheme]
    if model_type not in WRITERS:
        raise UserError(
            f"quant={name} is llama.cpp's choice by tensor, which has no model_type={model_type!r}: give quant={most.name}"
        )
    specs = linear_specs(model)
    targets = {layer: layout_of(model_type, model.config).llama_cpp_name(f"{layer}.weight") for layer in specs}
    num_layers = Counter(targets.values())  # experts of a layer share a tensor
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, target in targets.items():
        shape = specs[layer].shape
        shapes[target] = (num_layers[target], *shape) if "_exps." in target else shape
    types = tensor_types(name, shapes, WRITERS[model_type][0])
    overrides = {
        layer: OVERRIDES.get(types[target].name, types[target].name.lower())
        for layer, target in targets.items()
        if types[target].name != most.name.upper()
    }
    return replace(config, scheme=most, overrides=overrides | config.overrides)
