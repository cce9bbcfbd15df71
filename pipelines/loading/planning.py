"""Stage 2 of an engine: the model on the meta device, with its final layers. No weight is read yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from conf.decoding import warn_once
from conf.errors import UserError
from conf.quantization import (
    Activations,
    CalibrateConfig,
    KVCacheFormat,
    KVCacheScales,
    QuantConfig,
    QuantizeConfig,
    QuantScheme,
)
from conf.schema import DType, ModelConfig, ParallelMode, RunConfig
from kernels.collectives import NO_NEIGHBOURS, Group, Neighbours
from models.causal_lm import CausalLM
from models.exported.description import Description, part_folder, read_description
from models.exported.model import ExportedLM
from models.formats.base import CodedWeights, WeightFile
from models.formats.sliced import sliced_files
from models.heads import HeadKind
from models.linear_layers import pack_layers
from models.meta_model import open_model
from models.parallel import check_division, shard_model
from models.sharding import ParallelLayout, Shard
from models.weights import DTYPES, match_tensors, stored_dtype
from pipelines.loading.fingerprint import plain_quant
from pipelines.loading.memory import max_layer_values
from pipelines.loading.model_source import ModelSource
from quantization.kv_scales import ZERO_POINTS, place_kv_scales
from quantization.layouts import read_quantization
from quantization.layouts.base import StoredQuantization
from quantization.layouts.kv_cache import read_kv_cache_scheme
from quantization.linear import quantized_if_many
from quantization.plan import make_activations_auto, place_stored_layers, plan, quantize_while_loading


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
    """The options of quantisation: those of the KV cache and of activations apply to a quantised checkpoint, too."""
    packed: bool
    """Whether layers hold their weights in the kernels' packed form, and decode steps are captured."""
    static_cache: KVCacheFormat | None
    """The format of a KV cache whose static scales are among the files' tensors."""
    max_layer_values: int
    """Values per token, as `memory.max_layer_values` counts them."""
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

    `packed`: pack the layers; not for a model whose layers are replaced later. A scheme that needs calibration must be
    the checkpoint's own. Raises UserError for files that cannot be opened, and if the options contradict them.
    """
    if source.artefact is not None:
        return _plan_exported(options, quant, source, source.artefact, device)
    config = source.checkpoint.config
    model, files = open_model(source.architecture, source.shape, source.checkpoint if source.has_weights else None)
    model.eval()
    max_values = max_layer_values(model)
    _quantize(model, quant, read_quantization(config, files, device), files)
    static_cache = _place_cache_scales(model, quant, source, files)
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


def check_mode(source: ModelSource, mode: ParallelMode) -> None:
    """Raise UserError if `source` is an exported model that does not run in this mode."""
    if source.artefact is None:
        return
    folder = source.checkpoint.path
    if source.artefact.part is None and mode is not ParallelMode.single:
        raise UserError(f"parallel={mode.name} does not run {folder}, whose graph is of one process: leave it out")
    if source.artefact.part is not None and not mode.divides:
        raise UserError(f"parallel={mode.name} does not run {folder}, {_ranks_of(source.artefact.parallel_layout)}")


def _ranks_of(parallel_layout: ParallelLayout) -> str:
    """Return the end of an error message: the exported layout, and the options that run it."""
    tp, pp = parallel_layout.tp, parallel_layout.pp
    mode = "tp" if pp == 1 else "pp" if tp == 1 else "tp_pp"
    given = " ".join(f"parallel.{name}={number}" for name, number in (("tp", tp), ("pp", pp)) if number > 1)
    return f"which was exported for tp={tp} and pp={pp}: give parallel={mode} {given}"


def shard_plan(
    plan: ModelPlan, parallel_layout: ParallelLayout, group: Group, neighbours: Neighbours = NO_NEIGHBOURS
) -> ModelPlan:
    """Return the plan of one rank's shard. `plan` is the plan of the whole model; its model is sharded in place.

    Raises UserError if the files are not the whole model's, and as `shard_model` does.
    """
    if parallel_layout == ParallelLayout():
        return plan
    check_plan(plan, parallel_layout)
    if isinstance(plan.model, ExportedLM):
        whole, folder = plan.model, plan.source.checkpoint.path
        own = read_description(folder, parallel_layout.rank)
        has_head = plan.source.architecture.head is not HeadKind.none
        model = ExportedLM(own, part_folder(folder, parallel_layout), has_head, group, neighbours).eval()
        model.quantized = whole.quantized
        return replace(plan, model=model, parallel_layout=parallel_layout)
    matched = match_tensors(plan.model, plan.files, plan.ignored_tensors)
    shards = shard_model(plan.model, parallel_layout, group, plan.dtype, neighbours)
    files = sliced_files(plan.files, matched, plan.model, shards, parallel_layout)
    return replace(plan, files=files, parallel_layout=parallel_layout, whole_files=tuple(plan.files), shards=shards)


def check_plan(plan: ModelPlan, parallel_layout: ParallelLayout) -> None:
    """Raise UserError if a whole model cannot be sharded this way, or was exported for another layout.

    Called before ranks are started.
    """
    artefact = plan.source.artefact
    if artefact is None:
        if not plan.files:
            raise UserError(
                "model.weights=random makes other weights in parts than whole: give a checkpoint, or parallel=single"
            )
        check_division(plan.model, parallel_layout, plan.dtype)
        return
    folder, made_for = plan.source.checkpoint.path, artefact.parallel_layout
    if (parallel_layout.tp, parallel_layout.pp) != (made_for.tp, made_for.pp):
        raise UserError(
            f"tp={parallel_layout.tp} and pp={parallel_layout.pp} do not run {folder}, {_ranks_of(made_for)}"
        )
    if parallel_layout.adds or parallel_layout.whole_experts:
        given = "parallel.sum=reduce" if parallel_layout.adds else "parallel.experts=whole"
        raise UserError(f"{given} contradicts {folder}, which was exported for ranks that join pieces: leave it out")


def without_quantization(run: RunConfig) -> RunConfig:
    """Return the run of the float model for calibration.

    It computes no rows, so it has no prefixes and adapters. It reads the weights once, so it does not keep them packed.
    """
    model = replace(run.model, prefixes=None, adapters=None, keep_packed=False)
    device = replace(run.device, kept_prefixes=[])
    floats = replace(run, model=model, device=device, predict=replace(run.predict, adapter=None))
    return replace(floats, quant=QuantConfig(), calibrate=CalibrateConfig(), quantize=QuantizeConfig())


def _quantize(model: CausalLM, config: QuantConfig, stored: StoredQuantization | None, files: list[WeightFile]) -> None:
    if stored is not None:
        _place_stored(model, config, stored, files)
    elif config.scheme is not QuantScheme.none:
        assert not config.needs_calibration
        quantize_while_loading(model, config)
    if config.activations is Activations.auto:
        make_activations_auto(model)


def _place_stored(model: CausalLM, config: QuantConfig, stored: StoredQuantization, files: list[WeightFile]) -> None:
    if not files:
        raise UserError("model.weights=random makes float weights, but this checkpoint is quantised: leave it out")
    wanted = plan(model, config)
    schemes = place_stored_layers(model, stored, _shapes(files))
    for file in files:
        if isinstance(file, CodedWeights):
            file.keep_codes(schemes)
    if config.activations is Activations.dynamic and any(s.activations is Activations.static for s in schemes.values()):
        warn_once("the checkpoint's scales of activations are static, and are used: quant.activations=dynamic is not")
        wanted = {name: replace(scheme, activations=Activations.static) for name, scheme in wanted.items()}
    for name in wanted | schemes if wanted else ():
        given, held = (str(each.get(name, "a float")) for each in (wanted, schemes))
        if given != held:
            raise UserError(
                f"quant={config.scheme.name} contradicts the checkpoint, which is quantised already: {name} is {held} there, "
                f"not {given}: leave quant out, or give the float model"
            )


def _place_cache_scales(
    model: CausalLM, config: QuantConfig, source: ModelSource, files: list[WeightFile]
) -> KVCacheFormat | None:
    """Give attention modules the static KV cache scales of the checkpoint.

    Return their format, or None without such scales.
    """
    stored = read_kv_cache_scheme(source.checkpoint.config)
    if stored is None:
        if config.has_static_kv_cache:
            raise UserError(
                "quant.kv_cache_scales=static, but the checkpoint, which is quantised already, has no scales of the KV cache: "
                "give quant.kv_cache_scales=dynamic, or the float model"
            )
        return None
    given = config.kv_cache, config.kv_cache_scales
    if given not in ((KVCacheFormat.none, KVCacheScales.dynamic), (stored.format, KVCacheScales.static)):
        raise UserError(
            f"quant.kv_cache={given[0].name} with {given[1].name} scales contradicts the checkpoint, whose KV cache is "
            f"{stored.format.name} with static scales: leave quant.kv_cache out"
        )
    place_kv_scales(model, stored.per_head, _shapes(files))
    return stored.format


def _shapes(files: list[WeightFile]) -> dict[str, tuple[int, ...]]:
    return {name: shape for file in files for name, shape in file.shapes.items()}
