"""The pool of key/value blocks: computes how many blocks fit, and allocates them."""

import os
from collections.abc import Sequence

import torch

from conf.errors import UserError
from conf.support.sizes import num_bytes
from kernels.kv_format import KVFormat, PagedVectors, Unquantised, allocate
from models.batch import KVCache, LayerCache, LayerState, StateShapes
from models.layers.attention import Heads
from pipelines.engine.snapshots import MIN_TOKENS
from pipelines.engine.state_manager import StateManager

BLOCK_SIZE = {"cpu": 16, "cuda": 64}  # token slots in a block, by device type
TOKENS_PER_SNAPSHOT = 256
AUTO_SHARE = 0.5  # maximum share of the memory that is free when the pool is allocated


def allocate_kv_cache(
    layers: Sequence[Heads | StateShapes],
    num_blocks: int,
    block_size: int,
    formats: list[tuple[KVFormat, KVFormat]] | None,
    dtype: torch.dtype,
    device: torch.device,
    num_state_slots: int = 0,
) -> KVCache:
    """Allocate an uninitialised cache for `CausalLM.layer_caches`.

    `formats`: of the keys and values of each attention layer; None: not quantised. `dtype`: the dtype that the model
    computes in. `num_state_slots`: the number of sequences whose recurrent states it holds.
    """
    if formats is None:
        formats = [(Unquantised(), Unquantised())] * len(layers)
    next_formats = iter(formats)

    def paged(format: KVFormat, num_heads: int, channels: int) -> PagedVectors:
        size = (num_blocks, block_size, num_heads)
        # The values of a latent (MLA) cache have no channels, so there is nothing to quantise.
        return allocate(format if channels else Unquantised(), size, channels, dtype, device)

    def of_layer(layer: Heads | StateShapes) -> LayerCache | LayerState:
        if not isinstance(layer, Heads):
            shapes = [(num_state_slots, *shape) for shape in layer]
            return LayerState(tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes))
        of_keys, of_values = next(next_formats)
        return (
            paged(of_keys, layer.num_key_value_heads, layer.head_dim),
            paged(of_values, layer.num_key_value_heads, layer.value_head_dim),
        )

    return KVCache([of_layer(layer) for layer in layers])


def choose_num_state_slots(cache: KVCache, wanted_slots: int, wanted_tokens: int, memory: str, free: int) -> int:
    """Return the number of state slots: `wanted_slots` for sequences, and those of snapshots.

    The sequences' slots take at most half of `device.kv_cache_memory` (`memory`) with `free` bytes free. Of the rest,
    snapshots take at most a third, and one slot per TOKENS_PER_SNAPSHOT tokens of the KV cache. `cache`: one with the
    same layers and formats. `wanted_tokens`: the most tokens of an automatic cache. Raises UserError if half of the
    memory is less than two slots.
    """
    if not cache.states:
        return 0
    slot_bytes = cache.bytes_per_slot
    most = int(AUTO_SHARE * free) if memory == "auto" else num_bytes(memory, free)
    num_slots = min(wanted_slots, most // 2 // slot_bytes)
    if num_slots < 2:
        problem = (
            f"device.kv_cache_memory={memory} does not fit: a sequence's recurrent state takes {slot_bytes:,} bytes"
        )
        raise UserError(f"{problem}: give at least {4 * slot_bytes} bytes, a fraction, or auto")
    rest = most - num_slots * slot_bytes
    num_snapshots = min(rest // 3 // slot_bytes, rest // (TOKENS_PER_SNAPSHOT * cache.bytes_per_token + slot_bytes))
    if memory == "auto":
        num_snapshots = min(num_snapshots, wanted_tokens // TOKENS_PER_SNAPSHOT)
    return num_slots + num_snapshots


def state_manager_of(cache: KVCache) -> StateManager:
    """Return the manager of the cache's state slots. A state that is cheaper than MIN_TOKENS of KV is saved more often."""
    if not cache.states:
        return StateManager(0)
    saves_outputs = cache.bytes_per_slot < MIN_TOKENS * cache.bytes_per_token
    return StateManager(len(cache.states[0]), saves_outputs)


def choose_num_blocks(
    heads: Sequence[Heads],
    wanted_blocks: int,
    block_size: int,
    memory: str,
    free: int,
    formats: list[tuple[KVFormat, KVFormat]],
    dtype: torch.dtype,
    num_ranks: int = 1,
    num_sharing: int = 1,
    num_state_bytes: int = 0,
) -> int:
    """Return the number of blocks that fit `device.kv_cache_memory` (`memory`) with `free` bytes free.

    With `auto` it is at most `wanted_blocks`. `num_ranks` ranks share a size in bytes equally. `num_sharing`: number of
    ranks that share this device's free bytes. `num_state_bytes`: of recurrent states, which the size includes. Raises
    UserError if the size is less than one block or more than the free bytes.
    """
    one_block = allocate_kv_cache(heads, 1, block_size, formats, dtype, torch.device("meta"))
    # A pipeline stage may have no layer that stores keys and values.
    block_bytes = max(1, sum(tensor.nbytes for tensor in one_block.tensors))
    if memory == "auto":
        return max(1, min(wanted_blocks, (int(AUTO_SHARE * free) // num_sharing - num_state_bytes) // block_bytes))
    everywhere = free * num_ranks // num_sharing  # assumes that all machines are equal
    cache_bytes, free = num_bytes(memory, everywhere) // num_ranks, free // num_sharing
    if not num_state_bytes + block_bytes <= cache_bytes <= free:
        limits = f"from {num_state_bytes + block_bytes} (one block) to {free} (all free memory) bytes"
        raise UserError(f"device.kv_cache_memory={memory} does not fit: give {limits}, a fraction, or auto")
    return (cache_bytes - num_state_bytes) // block_bytes


def free_memory(device: torch.device, memory_fraction: float) -> int:
    """Return the free bytes. On a GPU, at most what remains of this process's `memory_fraction`."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return max(0, min(free + reserved - allocated, int(memory_fraction * total) - allocated))
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
