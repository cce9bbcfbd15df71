"""Stages 4 to 6 of loading an engine: load the weights, fuse layers that run in one call, build the engine.

Stages 1 to 3 are `model_source.py`, `planning.py` and, with ranks, `shard_plan.py`. On a GPU, the memory check comes
before the first weight is read.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import Activations
from conf.schema import DeviceConfig
from conf.speculation import BESIDE_AUTO, Speculate
from kernels.kv_format import FORMATS, KVFormat
from models.batch import KVCache
from models.exported.model import ExportedLM
from models.linear_layers import fuse_layers
from models.weights import initialise_randomly, load_weights
from pipelines.engine import Engine
from pipelines.engine.adapters import AdapterChange, Adapters
from pipelines.engine.engine_config import EngineConfig
from pipelines.engine.executor import Executor
from pipelines.engine.kv_cache import BLOCK_SIZE, allocate_kv_cache, choose_num_blocks, free_memory
from pipelines.engine.proposers.model import ModelProposer
from pipelines.engine.proposers.mtp import MtpProposer
from pipelines.loading.kept_prefixes import open_kept, place_kept
from pipelines.loading.memory import check_memory, step_bytes, weight_bytes
from pipelines.loading.packed_cache import load_packed
from pipelines.loading.planning import ModelPlan
from pipelines.loading.request_settings import RequestSettings
from pipelines.loading.soft_prefixes import place_prefixes, read_prefixes
from quantization.kv_scales import static_kv_formats
from quantization.plan import AUTO_NEEDS_INTEGERS
from quantization.smoothing_record import read_folds, smoothed_by

if TYPE_CHECKING:
    from pipelines.loading.driver import Driver

# An automatic KV cache has room for at least this number of sequences: a row may request several beams or samples.
AUTO_SEQUENCES = 16


def assemble(
    plan: ModelPlan,
    device: DeviceConfig,
    decode: DecodeConfig,
    settings: RequestSettings,
    max_num_requests: int,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    draft: ModelPlan | None = None,
    driver: "Driver | None" = None,
) -> Engine:
    """Build the engine of a planned model for at most `max_num_requests` concurrent requests.

    `on_bytes(done, total)` reports the progress of loading. `draft`: the draft model, planned for the same device and
    dtype. `driver`: the driver of the ranks that compute the model together. Raises UserError if the weights do not
    match the model, and if memory is too small.
    """
    decode = decode.resolved(settings.decode_defaults)
    num_sequences = max_num_requests * max(decode.n, decode.num_beams or 1)
    plans = [plan] if draft is None else [plan, draft]
    reserved = _reserve_memory(device, plans, num_sequences)
    prefixes = read_prefixes(plan.options.prefixes or {}, plan, settings)
    kept = open_kept(device.kept_prefixes, plan)
    for planned in plans:
        load_planned(planned, on_bytes)
    adapters = _load_adapters(plan, driver)
    num_tokens = [settings.context.num_tokens] * max(AUTO_SEQUENCES, num_sequences)
    num_tokens += [prefix.num_tokens for prefix in prefixes.values()]
    num_tokens += [row.num_slots for file in kept for row in file.rows]
    caches = _make_caches(device, plans, num_tokens, reserved, driver)
    num_graph_sequences = num_sequences if device.cuda_graphs and plan.packed else 0
    config = EngineConfig(
        settings.context,
        settings.eos_token_ids,
        settings.decode_defaults,
        max_num_requests,
        device.max_batched_tokens,
        num_graph_sequences=num_graph_sequences,
        decode_threads=device.decode_threads,
        unavailable_proposers=_unavailable_proposers(plan, draft),
    )
    make_executor = Executor if driver is None else driver.executor
    engine = Engine(plan.model, caches[0], settings.tokenizer, config, adapters, make_executor)
    place_prefixes(engine, prefixes)
    place_kept(engine, kept)
    _place_proposers(engine, plan, draft, caches, num_graph_sequences)
    return engine


def _place_proposers(
    engine: Engine, plan: ModelPlan, draft: ModelPlan | None, caches: list[KVCache], num_graph_sequences: int
) -> None:
    limits = engine.block_size, engine.config.max_batched_tokens
    if draft:
        executor = engine.executor.draft_executor(draft.model, caches[1], num_graph_sequences)
        engine.speculator.proposers[Speculate.model] = ModelProposer(executor, *limits, engine.vocab_size)
    if plan.model.config.capabilities.predicts_ahead:
        engine.speculator.proposers[Speculate.mtp] = MtpProposer(engine.executor, *limits)


def make_adapters(plan: ModelPlan, on_change: Callable[[AdapterChange], None] = lambda change: None) -> Adapters:
    """Return the empty adapter table of the loaded model. `on_change`: called with each change, as in `Adapters`."""
    checkpoint = plan.source.checkpoint
    smoothing, folds = smoothed_by(checkpoint.config, checkpoint.path), read_folds(checkpoint.path, plan.model)
    base, num_slots = plan.whole_files or plan.files, plan.options.max_adapters
    return Adapters(plan.model, plan.dtype, plan.device, num_slots, folds, smoothing, base, on_change)


def _load_adapters(plan: ModelPlan, driver: "Driver | None") -> Adapters:
    adapters = make_adapters(plan) if driver is None else make_adapters(plan, driver.workers.tell)
    for name, folder in (plan.options.adapters or {}).items():
        adapters.load(name, Path(folder).expanduser(), in_use=())
    return adapters


def _unavailable_proposers(plan: ModelPlan, draft: ModelPlan | None) -> dict[Speculate, str]:
    reasons = {}
    if draft is None:
        reasons[Speculate.model] = "has no model that drafts: give decode.speculate=model and its path to the run"
    if not plan.model.config.capabilities.predicts_ahead:
        reasons[Speculate.mtp] = "has no layer that drafts: give decode.speculate=mtp to the run"
    if plan.quant.activations is Activations.auto:
        reason = f"contradicts quant.activations=auto, {BESIDE_AUTO}: leave one of them out"
        reasons |= {each: reason for each in Speculate if each is not Speculate.none}
    return reasons


def _reserve_memory(config: DeviceConfig, plans: list[ModelPlan], num_sequences: int) -> int:
    """Return the bytes of GPU memory for the tensors of a step.

    Raises UserError if weights and step exceed the free memory.
    """
    device = plans[0].device
    if device.type != "cuda":
        return 0
    step = max(
        step_bytes(
            plan.max_layer_values, plan.model.config.vocab_size, plan.dtype, config.max_batched_tokens, num_sequences
        )
        for plan in plans
    )
    weights = sum(weight_bytes(plan.model, plan.dtype) for plan in plans)
    check_memory(weights, step, free_memory(device, config.memory_fraction), config.memory_fraction)
    return step


def load_planned(plan: ModelPlan, on_bytes: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Load the planned model's weights (random, kept packed, or from the files), then fuse its packed layers."""
    model, dtype, device = plan.model, plan.dtype, plan.device
    read = partial(load_weights, model, plan.files, plan.ignored_tensors, dtype, device, on_bytes)
    if isinstance(model, ExportedLM):
        model.load()
        if model.quantized is not None and not model.graph.num_quantized:
            raise UserError(AUTO_NEEDS_INTEGERS)
        if plan.options.adapters:
            _ = model.adapted_graph  # a damaged adapter graph fails here, not in a step
        return
    if not plan.files:
        initialise_randomly(model, dtype, device)
    elif plan.options.keep_packed:
        load_packed(plan, read)
    else:
        read()
    if plan.packed:
        fuse_layers(model, device)


def most_blocks(plan: ModelPlan, config: DeviceConfig, num_ranks: int, num_sharing: int) -> int:
    """Return the number of KV cache blocks for which this rank has memory.

    `num_ranks`: number of ranks that divide the cache. `num_sharing`: number of these ranks that use the memory of this
    device. Raises UserError as `choose_num_blocks` does.
    """
    heads = plan.model.attention_heads
    size, free = config.block_size or BLOCK_SIZE[plan.device.type], free_memory(plan.device, config.memory_fraction)
    formats = cache_formats(plan)
    return choose_num_blocks(
        heads, 2**62, size, config.kv_cache_memory, free, formats, plan.dtype, num_ranks, num_sharing
    )


def _make_caches(
    config: DeviceConfig, plans: list[ModelPlan], num_tokens: list[int], reserved: int, driver: "Driver | None"
) -> list[KVCache]:
    """Allocate one KV cache per model, all with the same number of blocks. Leave `reserved` bytes free for a step.

    `num_tokens`: the length of each sequence and each prefix. An automatic cache has room for all, if memory allows.
    """
    device, dtype = plans[0].device, plans[0].dtype
    block_size = config.block_size or BLOCK_SIZE[device.type]
    wanted_blocks = sum(-(-n // block_size) for n in num_tokens)
    free = max(0, free_memory(device, config.memory_fraction) - reserved)
    layers = [(plan.model.attention_heads, cache_formats(plan)) for plan in plans]
    heads, formats = (list(chain(*parts)) for parts in zip(*layers, strict=True))
    sizes = wanted_blocks, block_size, config.kv_cache_memory, free
    ranks = (driver.context.size, driver.context.num_sharing) if driver else ()
    num_blocks = choose_num_blocks(heads, *sizes, formats, dtype, *ranks)
    if driver:
        num_blocks = driver.fewest_blocks(num_blocks)
    return [allocate_kv_cache(heads, num_blocks, block_size, formats, dtype, device) for heads, formats in layers]


def cache_formats(plan: ModelPlan) -> list[tuple[KVFormat, KVFormat]]:
    """Return the format of each layer's keys and values.

    Static scales are read from the loaded model. A multi-token prediction (MTP) layer has no static scales.
    """
    if isinstance(plan.model, ExportedLM):
        return plan.model.kv_formats
    static = static_kv_formats(plan.model, plan.static_cache) if plan.static_cache else []
    dynamic = FORMATS[(plan.static_cache or plan.quant.kv_cache).name]
    return static + [dynamic] * (len(plan.model.attention_heads) - len(static))
