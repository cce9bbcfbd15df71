"""Stage 5 of loading an engine: choose the number of KV cache blocks by the free memory, and allocate the caches."""

from itertools import chain
from typing import TYPE_CHECKING

import torch

from conf.schema import DeviceConfig
from kernels.kv_format import FORMATS, KVFormat
from models.batch import KVCache
from models.exported.model import ExportedLM
from pipelines.engine.kv_cache import (
    BLOCK_SIZE,
    CacheRoom,
    allocate_kv_cache,
    cache_room,
    choose_sizes,
    choose_window_blocks,
    free_memory,
    slot_cost,
    window_memory,
)
from pipelines.engine.window_blocks import blocks_per_sequence
from pipelines.jobs.run_log import note
from pipelines.loading.memory import check_memory, step_bytes, weight_bytes
from pipelines.loading.model_plan import ModelPlan
from quantization.kv_scales import static_kv_formats

if TYPE_CHECKING:
    from pipelines.loading.driver import Driver


def reserve_memory(config: DeviceConfig, plans: list[ModelPlan], num_sequences: int) -> int:
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


def block_size_of(config: DeviceConfig, device: torch.device) -> int:
    """Return the tokens of a KV cache block."""
    return config.block_size or BLOCK_SIZE[device.type]


def room_of(plans: list[ModelPlan], config: DeviceConfig, free: int, num_ranks: int, num_sharing: int) -> CacheRoom:
    """Return this rank's memory for the caches of these models, of `free` bytes.

    Layers of a draft model count as layers without windows. `num_ranks`: number of ranks that divide the cache.
    `num_sharing`: number of these ranks that use the memory of this device. Raises UserError as `cache_room` does.
    """
    drafting = chain.from_iterable(plan.model.layer_caches for plan in plans[1:])
    layers = [*plans[0].model.layer_caches, *(content._replace(window=None) for content in drafting)]
    formats = [*chain.from_iterable(cache_formats(plan) for plan in plans)]
    block_size, meta = block_size_of(config, plans[0].device), torch.device("meta")
    one = allocate_kv_cache(layers, 1, block_size, formats, plans[0].dtype, meta, 1, num_window_blocks=1)
    return cache_room(one, config.kv_cache_memory, free, num_ranks, num_sharing)


def allocate_cache(
    plan: ModelPlan, config: DeviceConfig, num_blocks: int, num_state_slots: int, num_window_blocks: int
) -> KVCache:
    block_size = block_size_of(config, plan.device)
    layers, settings = plan.model.layer_caches, (cache_formats(plan), plan.dtype, plan.device)
    return allocate_kv_cache(layers, num_blocks, block_size, *settings, num_state_slots, num_window_blocks)


def make_caches(
    config: DeviceConfig,
    plans: list[ModelPlan],
    num_tokens: list[int],
    num_kept_blocks: int,
    num_slots: int,
    max_windows: int,
    reserved: int,
    driver: "Driver | None",
) -> list[KVCache]:
    """Allocate one KV cache per model, all with the same number of blocks. Leave `reserved` bytes free for a step.

    `num_tokens`: the length of each sequence and each soft prefix. `num_kept_blocks`: the blocks of kept prompts. An
    automatic cache has room for all, if memory allows. `num_slots`: the recurrent states that it has room for besides
    snapshots, if memory allows. `max_windows`: how many sequences run at once, if layers with windows may have blocks of
    their own, else 0. A draft model has one pool, because it computes a prompt whose first window blocks are released.
    """
    device = plans[0].device
    block_size = block_size_of(config, device)
    wanted_blocks = sum(-(-n // block_size) for n in num_tokens) + num_kept_blocks
    free = max(0, free_memory(device, config.memory_fraction) - reserved)
    ranks = (driver.context.size, driver.context.num_sharing) if driver else (1, 1)
    rooms = [room_of(plans, config, free, *ranks), *(driver.other_rooms() if driver else [])]
    window, num_window_blocks, memory = plans[0].model.longest_window, 0, config.kv_cache_memory
    if max_windows and window is not None:
        per_window = blocks_per_sequence(window, block_size)
        needed = max_windows * per_window + -(-config.max_batched_tokens // block_size) + num_kept_blocks
        num_window_blocks = choose_window_blocks(rooms, block_size, per_window, needed, wanted_blocks, memory)
    rooms = [room.with_window_blocks(num_window_blocks, block_size) for room in rooms]
    sizes = choose_sizes(rooms, block_size, wanted_blocks, num_slots, memory)
    caches = [allocate_cache(plan, config, *sizes, num_window_blocks * (plan is plans[0])) for plan in plans]
    for line in filter(None, chain(map(slot_cost, caches), map(window_memory, caches))):
        note(line)
    return caches


def cache_formats(plan: ModelPlan) -> list[tuple[KVFormat, KVFormat]]:
    """Return the format of each layer's keys and values.

    Static scales are read from the loaded model. A multi-token prediction (MTP) layer has no static scales.
    """
    if isinstance(plan.model, ExportedLM):
        return plan.model.kv_formats
    static = static_kv_formats(plan.model, plan.static_cache) if plan.static_cache else []
    dynamic = FORMATS[(plan.static_cache or plan.quant.kv_cache).name]
    return static + [dynamic] * (len(plan.model.attention_heads) - len(static))
