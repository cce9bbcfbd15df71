"""How the files of a quantised model are laid out: by `export.format`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from conf.errors import UserError
from conf.quantization import ExportFormat, QuantConfig, QuantMethod
from models.causal_lm import CausalLM
from models.layers.linear import Layer, Linear, TiedHead
from quantization.artefact import LayoutOf
from quantization.layouts import awq, compressed_tensors, gptq
from quantization.layouts.base import WritableLayout
from quantization.plan import plan
from quantization.scheme import LinearScheme


@dataclass(frozen=True)
class Export:
    schemes: dict[str, LinearScheme]
    """By layer, with scales of the dtype that the files hold."""
    config: dict[str, Any]
    """The quantization_config."""
    layout_of: LayoutOf


def export_of(model: CausalLM, quant: QuantConfig, format: ExportFormat) -> Export:
    """Of a model in floats. Raises UserError as `plan` does, and for what the format cannot hold."""
    schemes = plan(model, quant)
    linears = [name for name, module in model.named_modules() if isinstance(module, Linear | TiedHead)]
    kept = [name for name in linears if name not in schemes]
    is_permuted = quant.method is QuantMethod.gptq and quant.gptq.act_order and not quant.gptq.static_groups
    kv_cache = quant.kv_cache if quant.has_static_kv_cache else None
    if format is ExportFormat.compressed_tensors:
        config = compressed_tensors.write_config(schemes, kept, is_permuted, kv_cache)
        return Export(schemes, config, _compressed)
    if kv_cache is not None:
        raise UserError(
            f"export.format={format.name} has no scales of the KV cache: give compressed_tensors, or quant.kv_cache_scales=dynamic"
        )
    schemes = {  # these files have float16 scales: codes are chosen for what they are there
        name: replace(scheme, weights=replace(scheme.weights, scale_dtype=torch.float16))
        for name, scheme in schemes.items()
    }
    if format is ExportFormat.awq:
        return Export(schemes, awq.write_config(schemes, kept), _awq)
    config = gptq.write_config(schemes, kept, is_permuted)
    is_v1 = config["checkpoint_format"] == gptq.V1

    def layout(layer: Layer, scheme: LinearScheme, found: Mapping[str, tuple[int, ...]]) -> WritableLayout:
        return gptq.GptqWeight(layer.shape, scheme.weights, is_v1)

    return Export(schemes, config, layout)


def _compressed(layer: Layer, scheme: LinearScheme, found: Mapping[str, tuple[int, ...]]) -> WritableLayout:
    return compressed_tensors.CompressedWeight(layer.shape, scheme, compressed_tensors.is_packed(scheme), found)


def _awq(layer: Layer, scheme: LinearScheme, found: Mapping[str, tuple[int, ...]]) -> WritableLayout:
    return awq.AwqWeight(layer.shape, scheme.weights)
