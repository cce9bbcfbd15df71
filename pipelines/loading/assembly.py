"""Stage 6 of loading an engine: build the engine of a planned model, whose weights it loads.

Stages 1 to 3 are `model_source.py`, `planning.py` and, with ranks, `shard_plan.py`; 4 and 5 are `weight_loading.py` and
`cache_allocation.py`. On a GPU, the memory check comes before the first weight is read.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from conf.decoding import DecodeConfig
from conf.schema import DeviceConfig
from pipelines.engine import Engine
from pipelines.engine.engine_config import EngineConfig
from pipelines.engine.executor import Executor
from pipelines.engine.state_manager import StateManager
from pipelines.loading.adapter_table import load_adapters
from pipelines.loading.cache_allocation import block_size_of, make_caches, reserve_memory
from pipelines.loading.drafting import place_proposers, unavailable_proposers
from pipelines.loading.kept_prefixes import count_blocks, open_kept, place_kept
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.request_settings import RequestSettings
from pipelines.loading.soft_prefixes import place_prefixes, read_prefixes
from pipelines.loading.weight_loading import load_planned

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
    window_blocks: bool = False,
) -> Engine:
    """Build the engine of a planned model for at most `max_num_requests` concurrent requests.

    `on_bytes(done, total)` reports the progress of loading. `draft`: the draft model, planned for the same device and
    dtype. `driver`: the driver of the ranks that compute the model together. `window_blocks`: let layers with
    windows have blocks of their own, unless the model has a multi-token prediction (MTP) layer. Raises UserError if the
    weights do not match the model, and if memory is too small.
    """
    decode = decode.resolved(settings.decode_defaults)
    num_sequences = max_num_requests * max(decode.n, decode.num_beams or 1)
    plans = [plan] if draft is None else [plan, draft]
    reserved = reserve_memory(device, plans, num_sequences)
    prefixes = read_prefixes(plan.options.prefixes or {}, plan, settings)
    kept_files = open_kept(device.kept_prefixes, plan)
    for planned in plans:
        load_planned(planned, on_bytes)
    adapters = load_adapters(plan, driver)
    most_sequences = max(AUTO_SEQUENCES, num_sequences)
    num_kept_blocks = count_blocks(kept_files, block_size_of(device, plan.device))
    num_tokens = [settings.context.num_tokens] * most_sequences + [prefix.num_tokens for prefix in prefixes.values()]
    num_slots = StateManager.num_needed(most_sequences) + sum(len(file.rows) for file in kept_files)
    max_windows = most_sequences if window_blocks and not plan.model.config.capabilities.predicts_ahead else 0
    caches = make_caches(device, plans, num_tokens, num_kept_blocks, num_slots, max_windows, reserved, driver)
    num_graph_sequences = num_sequences if device.cuda_graphs and plan.packed else 0
    config = EngineConfig(
        *(settings.context, settings.eos_token_ids, settings.decode_defaults),
        *(max_num_requests, device.max_batched_tokens),
        num_graph_sequences=num_graph_sequences,
        decode_threads=device.decode_threads,
        unavailable_proposers=unavailable_proposers(plan, draft),
    )
    make_executor = Executor if driver is None else driver.executor
    engine = Engine(plan.model, caches[0], settings.tokenizer, config, adapters, make_executor)
    place_prefixes(engine, prefixes)
    place_kept(engine, kept_files)
    place_proposers(engine, plan, draft, caches, num_graph_sequences)
    return engine
