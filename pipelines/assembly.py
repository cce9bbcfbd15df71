"""Stages 3 to 5 of an engine: load the planned model's weights, prepare what is computed together, and build the engine.

`pipelines/opening.py` and `pipelines/planning.py` are the stages before. Of the weights nothing is read before a GPU's memory is known to
hold them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from conf.quantization import Activations
from conf.schema import DeviceConfig, RunConfig
from conf.speculation import Speculate
from kernels.kv_format import FORMATS, KVFormat
from models.batch import KVCache
from models.linear_layers import bring_together
from models.weights import initialise_randomly, load_weights
from pipelines.engine import Engine
from pipelines.engine.adapters import Adapters
from pipelines.engine.kv_cache import BLOCK_SIZE, allocate_kv_cache, choose_num_blocks, free_memory
from pipelines.kept_prefixes import open_kept, place_kept
from pipelines.memory import check_memory, step_bytes, weight_bytes
from pipelines.packed_cache import load_packed
from pipelines.planning import ModelPlan
from pipelines.request_settings import RequestSettings
from pipelines.soft_prefixes import place_prefixes, read_prefixes
from quantization.kv_scales import static_kv_formats
from quantization.smoothing_mark import smoothed_by

AUTO_SEQUENCES = 16  # that an automatic cache holds at least: rows may ask for beams or samples of their own


def assemble(
    run: RunConfig,
    plan: ModelPlan,
    settings: RequestSettings,
    max_num_requests: int,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Engine:
    """Build the engine of a planned model for at most `max_num_requests` at once. `on_bytes(done, total)` follows the weights.

    Raises UserError for weights that are not the model's, and where memory is too small.
    """
    decode = run.decode.resolved(settings.decode_defaults)
    num_sequences = max_num_requests * max(decode.n, decode.num_beams or 1)
    reserved = _reserve_memory(run.device, plan, num_sequences)
    prefixes = read_prefixes(run.model.prefixes or {}, plan, settings)
    kept = open_kept(run, plan.source, plan.dtype)
    _load(run, plan, on_bytes)
    if plan.packed:
        bring_together(plan.model, plan.device)
    checkpoint = plan.source.checkpoint
    smoothing = smoothed_by(checkpoint.config, checkpoint.path)
    adapters = Adapters(plan.model, plan.dtype, plan.device, run.model.max_adapters, smoothing)
    for name, folder in (run.model.adapters or {}).items():
        adapters.load(name, Path(folder).expanduser(), in_use=())
    num_tokens = [settings.context.num_tokens] * max(AUTO_SEQUENCES, num_sequences)
    num_tokens += [prefix.num_tokens for prefix in prefixes.values()]
    num_tokens += [row.num_slots for file in kept for row in file.rows]
    engine = Engine(
        plan.model,
        _make_cache(run, plan, num_tokens, reserved),
        settings.tokenizer,
        settings.context,
        settings.eos_token_ids,
        settings.decode_defaults,
        max_num_requests,
        run.device.max_batched_tokens,
        num_graph_sequences=num_sequences if run.device.cuda_graphs and plan.packed else 0,
        decode_threads=run.device.decode_threads,
        undrafted=_undrafted(run),
        adapters=adapters,
    )
    place_prefixes(engine, prefixes)
    place_kept(engine, kept)
    return engine


def _undrafted(run: RunConfig) -> dict[Speculate, str]:
    """Return who cannot draft the engine's tokens, and why."""
    reasons = dict.fromkeys((Speculate.model, Speculate.mtp), "does not exist yet: give ngram or none")
    if run.quant.activations is Activations.auto:
        bits = "quant.activations=auto, with which bits depend on how many tokens are computed at once"
        reasons |= {each: f"contradicts {bits}: leave one of them out" for each in Speculate if each.value != "none"}
    return reasons


def _reserve_memory(config: DeviceConfig, plan: ModelPlan, num_sequences: int) -> int:
    """Return the bytes of a GPU that a step may take. Raises UserError where these and the weights are more than is free."""
    if plan.device.type != "cuda":
        return 0
    vocab_size = plan.model.config.vocab_size
    step = step_bytes(plan.max_layer_values, vocab_size, plan.dtype, config.max_batched_tokens, num_sequences)
    free = free_memory(plan.device, config.memory_fraction)
    check_memory(weight_bytes(plan.model, plan.dtype), step, free, config.memory_fraction)
    return step


def _load(run: RunConfig, plan: ModelPlan, on_bytes: Callable[[int, int], None]) -> None:
    """Give the planned model its weights: random ones, those that are kept packed, or the files'."""
    model, dtype, device = plan.model, plan.dtype, plan.device
    read = partial(load_weights, model, plan.files, plan.ignored_tensors, dtype, device, on_bytes)
    if not plan.files:
        initialise_randomly(model, dtype, device)
    elif run.model.keep_packed:
        load_packed(run, plan, read)
    else:
        read()


def _make_cache(run: RunConfig, plan: ModelPlan, num_tokens: list[int], reserved: int) -> KVCache:
    """Allocate the KV cache, where its size is automatic for at most so many tokens each, beside `reserved` bytes for a step."""
    config, heads, formats = run.device, plan.model.attention_heads, _cache_formats(run, plan)
    block_size = config.block_size or BLOCK_SIZE[plan.device.type]
    wanted_blocks = sum(-(-n // block_size) for n in num_tokens)
    free = max(0, free_memory(plan.device, config.memory_fraction) - reserved)
    num_blocks = choose_num_blocks(heads, wanted_blocks, block_size, config.kv_cache_memory, free, formats, plan.dtype)
    return allocate_kv_cache(heads, num_blocks, block_size, formats, plan.dtype, plan.device)


def _cache_formats(run: RunConfig, plan: ModelPlan) -> list[tuple[KVFormat, KVFormat]]:
    """Return the format of each layer's keys and values. Static scales are read from the loaded model."""
    if plan.static_cache:
        return static_kv_formats(plan.model, plan.static_cache)
    return [FORMATS[run.quant.kv_cache.name]] * len(plan.model.attention_heads)
