"""Stage 2 of loading an engine: build the model on the meta device, with its final layers. Reads no weights."""

import torch

from conf.errors import UserError
from conf.quantization import FP4, MIXTURES, QuantConfig, QuantScheme
from conf.schema import DType, ModelConfig
from models.linear_layers import pack_layers
from models.meta_model import open_model
from models.weights import DTYPES, stored_dtype
from pipelines.loading.exported_plan import plan_exported
from pipelines.loading.format_plan import resolve_plan
from pipelines.loading.layer_formats import choose_layer_formats, place_cache_scales
from pipelines.loading.memory import max_layer_values
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_source import ModelSource
from quantization.kv_scales import ZERO_POINTS
from quantization.layouts import ignored_tensors, read_quantization


def plan_model(
    options: ModelConfig, quant: QuantConfig, source: ModelSource, device: torch.device, packed: bool
) -> ModelPlan:
    """Build the model on the meta device, with the layers that the checkpoint or the `quant` option requires.

    `packed`: whether to pack the layers; False for a model whose layers are replaced later. This function does not
    calibrate: if the scheme needs calibration, the checkpoint must already be quantised with it. Raises UserError if a
    file cannot be opened, and if the options contradict the files.
    """
    if source.exported is not None:
        return plan_exported(options, quant, source, source.exported, device)
    config = source.checkpoint.config
    model, files = open_model(source.architecture, source.shape, source.checkpoint if source.has_weights else None)
    model.eval()
    max_values = max_layer_values(model)
    if quant.scheme.is_blocks and quant.scheme not in FP4 and device.type != "cpu":
        raise UserError(
            f"quant={quant.scheme.name} is for a CPU, not device={device.type}: give quant=int4, int8, mxfp4 or nvfp4"
        )
    if quant.scheme in MIXTURES:
        from quantization.mixtures import resolve_mixture  # imported here: other schemes do not need gguf

        quant = resolve_mixture(quant, model, config.require("model_type", str))
    if quant.scheme is QuantScheme.auto:
        quant = resolve_plan(quant, model)
    stored = read_quantization(config, files, device)
    choose_layer_formats(model, quant, stored, files, config)
    static_cache = place_cache_scales(model, quant, source, files)
    dtype = DTYPES[stored_dtype(config, files) if options.dtype is DType.auto else options.dtype.name]
    if packed:
        pack_layers(model, dtype, device)
    ignored = (*source.architecture.ignored_tensors, *(ZERO_POINTS if static_cache else ()))
    ignored += ignored_tensors(stored)
    return ModelPlan(source, model, files, ignored, dtype, device, options, quant, packed, static_cache, max_values)
