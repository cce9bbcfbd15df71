"""Give an engine the tiers of `device.kv_cache_tiers`, and refuse models and runs that cannot use them."""

import hashlib
import json
from pathlib import Path

import torch

from conf.cache_tiers import read_tiers
from conf.errors import UserError
from conf.schema import DeviceConfig
from models.batch import KVCache
from pipelines.engine import Engine
from pipelines.engine.file_tier import FileTier
from pipelines.engine.kv_cache import free_memory
from pipelines.engine.kv_tiers import KVTiers, block_bytes
from pipelines.engine.memory_tier import MemoryTier
from pipelines.jobs.run_log import note
from pipelines.loading.kept_prefixes import UNSHARED, identity
from pipelines.loading.model_plan import ModelPlan


def check_tiers(device: DeviceConfig, plan: ModelPlan, draft: ModelPlan | None) -> None:
    """Raise UserError if the engine of this plan cannot use the tiers. `draft`: as for `assemble`."""
    if not device.kv_cache_tiers:
        return
    capabilities = plan.source.shape.capabilities
    capabilities.refuse_recurrent("device.kv_cache_tiers")
    if not capabilities.shares_prefixes:
        raise UserError(f"device.kv_cache_tiers {UNSHARED}: leave it out")
    if draft is not None or capabilities.predicts_ahead:
        mode = "model" if draft is not None else "mtp"
        problem = f"device.kv_cache_tiers is not supported with decode.speculate={mode}, whose cache has no tiers"
        raise UserError(f"{problem}: leave one of them out, or give decode.speculate=ngram")


def place_tiers(engine: Engine, plan: ModelPlan, device: DeviceConfig) -> None:
    """Give the engine the tiers of `device`. Raises UserError for sizes that do not fit, and as `FileTier` does."""
    if not device.kv_cache_tiers:
        return
    limits, cache, memory, file = read_tiers(device.kv_cache_tiers), engine.executor.cache, None, None
    size, lines = block_bytes(cache), []
    if limits.memory_bytes:
        memory = MemoryTier(_num_in_memory(limits.memory_bytes, size, cache), size)
        lines.append(f"{limits.memory_bytes // size:,} blocks in memory")
    if limits.folder:
        file = FileTier(Path(limits.folder), limits.file_bytes, _identity(plan, cache), size)
        lines.append(f"{file.num_contents:,} blocks in {limits.folder}")
    note(f"KV cache tiers: {' and '.join(lines)}, of {size:,} bytes each")
    engine.use_tiers(KVTiers(cache, memory, file))


def _num_in_memory(num_bytes: int, block_size: int, cache: KVCache) -> int:
    free = free_memory(torch.device("cpu"), 1.0)
    if cache.device.type == "cpu":
        free -= cache.num_blocks * block_size  # not written yet, so the system counts it as free
    if not block_size <= num_bytes <= free:
        limits = f"from {block_size} (one block) to {max(0, free)} (the memory that the KV cache leaves) bytes"
        raise UserError(f"device.kv_cache_tiers: memory:{num_bytes} does not fit: give {limits}, or leave it out")
    return num_bytes // block_size


def _identity(plan: ModelPlan, cache: KVCache) -> bytes:
    """Return the sha256 of all that the contents of blocks depend on besides their hashes."""
    parts = identity(plan.source, plan.options.weights, plan.quant, plan.dtype, plan.device)
    layout = [(str(tensor.dtype), list(tensor.shape[1:])) for tensor in cache.tensors]
    return hashlib.sha256(json.dumps([parts, layout], sort_keys=True).encode()).digest()
