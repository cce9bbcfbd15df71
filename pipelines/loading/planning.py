"""Stage 2 of loading an engine: build the model on the meta device, with its final layers. Reads no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from conf.errors import UserError
from conf.quantization import MIXTURES, Activations, KVCacheFormat, QuantConfig
from conf.schema import DType, ModelConfig
from models.causal_lm import CausalLM
from models.exported.description import Description, part_folder
from models.exported.model import ExportedLM
from models.formats.base import WeightFile
from models.heads import HeadKind
from models.linear_layers import pack_layers
from models.meta_model import open_model
from models.sharding import ParallelLayout, Shard
from models.weights import DTYPES, stored_dtype
from pipelines.loading.fingerprint import plain_quant
from pipelines.loading.layer_formats import choose_layer_formats, place_cache_scales
from pipelines.loading.memory import max_layer_values
from pipelines.loading.model_source import ModelSource
from quantization.kv_scales import ZERO_POINTS
from quantization.layouts import read_quantization
from quantization.linear import quantized_if_many


@dataclass(frozen=True)
class ModelPlan:
    """A model that can be loaded, and its target device and dtype."""

    source: ModelSource
    model: CausalLM
    """On the meta device."""
    files: list[WeightFile]
    """The checkpoint's weight files; none with model.weights=random."""
    ignored_tensors: tuple[str, ...]
    """Suffixes of tensor names in the files that are not parameters."""
    dtype: torch.dtype
    device: torch.device
    options: ModelConfig
    """The options with which the model was opened."""
    quant: QuantConfig
    """The options of quantisation. The options for KV cache and activations also apply to a quantised checkpoint."""
    packed: bool
    """Whether layers hold their weights in the kernels' packed form, and decode steps are captured."""
    static_cache: KVCacheFormat | None
    """The format of the KV cache, if the files contain its static scales; else None."""
    max_layer_values: int
    """Most values per token that are live around a linear layer (`memory.max_layer_values`); 0 for an exported model."""
    parallel_layout: ParallelLayout = ParallelLayout()
    """The rank and layout of this shard; by default the whole model."""
    whole_files: tuple[WeightFile, ...] = ()
    """The checkpoint's whole files, if `files` holds sharded views of them."""
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """The shard of each sharded tensor, by name. Other tensors are replicated."""


def plan_model(
    options: ModelConfig, quant: QuantConfig, source: ModelSource, device: torch.device, packed: bool
) -> ModelPlan:
    """Build the model on the meta device, with the layers that the checkpoint or the `quant` option requires.

    `packed`: whether to pack the layers; False for a model whose layers are replaced later. This function does not
    calibrate: if the scheme needs calibration, the checkpoint must already be quantised with it. Raises UserError if a
    file cannot be opened, and if the options contradict the files.
    """
    if source.artefact is not None:
        return _plan_exported(options, quant, source, source.artefact, device)
    config = source.checkpoint.config
    model, files = open_model(source.architecture, source.shape, source.checkpoint if source.has_weights else None)
    model.eval()
    max_values = max_layer_values(model)
    if quant.scheme.is_blocks and device.type != "cpu":
        raise UserError(f"quant={quant.scheme.name} is for a CPU, not device={device.type}: give quant=int4 or int8")
    if quant.scheme in MIXTURES:
        from quantization.mixtures import resolve_mixture  # imported here: other schemes do not need gguf

        quant = resolve_mixture(quant, model, config.require("model_type", str))
    choose_layer_formats(model, quant, read_quantization(config, files, device), files)
    static_cache = place_cache_scales(model, quant, source, files)
    dtype = DTYPES[stored_dtype(config, files) if options.dtype is DType.auto else options.dtype.name]
    if packed:
        pack_layers(model, dtype, device)
    ignored = (*source.architecture.ignored_tensors, *(ZERO_POINTS if static_cache else ()))
    return ModelPlan(source, model, files, ignored, dtype, device, options, quant, packed, static_cache, max_values)


def _plan_exported(
    options: ModelConfig, quant: QuantConfig, source: ModelSource, artefact: Description, device: torch.device
) -> ModelPlan:
    folder = source.checkpoint.path
    if device.type != "cpu":
        raise UserError(f"device={device.type} does not run {folder}, which is packed for a CPU: give device=cpu")
    given = replace(quant, activations=quant.activations.of_model)
    if given != QuantConfig() and plain_quant(given) != artefact.quant:
        raise UserError(f"quant contradicts {folder}, which was exported with its own: leave quant out")
    model = ExportedLM(
        artefact, part_folder(folder, artefact.parallel_layout), source.architecture.head is not HeadKind.none
    ).eval()
    if quant.activations is Activations.auto:
        model.quantized = quantized_if_many
    return ModelPlan(source, model, [], (), artefact.dtype, device, options, quant, True, None, 0)
