"""The pools of key/value blocks and of recurrent states: compute how many fit, and allocate them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.errors import UserError
from conf.support.sizes import num_bytes
from kernels.kv_format import KVFormat, PagedVectors, Unquantised, allocate
from models.batch import AnyCache, KVCache, LayerCache, LayerState, join_cache
from models.causal_lm import CacheContent
from models.layers.attention import Heads
from pipelines.engine.snapshots import MIN_TOKENS
from pipelines.engine.state_manager import StateManager
from pipelines.engine.window_blocks import WindowBlocks

BLOCK_SIZE = {"cpu": 16, "cuda": 64}  # token slots in a block, by device type
TOKENS_PER_SNAPSHOT = 256
MOST_EMPTY_BLOCKS = 2**18
"""The most blocks of a model without attention. They need no memory but the lists of the block manager."""
TOKENS_PER_WINDOW = 4096
"""A cache whose size the user gives keeps a window for each prompt of this length, so that a next turn finds both."""
AUTO_SHARE = 0.5  # maximum share of the memory that is free when the pool is allocated


def allocate_kv_cache(
    layers: Sequence[CacheContent],
    num_blocks: int,
    block_size: int,
    formats: list[tuple[KVFormat, KVFormat]] | None,
    dtype: torch.dtype,
    device: torch.device,
    num_state_slots: int = 0,
    num_window_blocks: int = 0,
) -> KVCache:
    """Allocate an uninitialised cache for `CausalLM.layer_caches`.

    `formats`: of the keys and values of each attention layer; None: not quantised. `dtype`: the dtype that the model
    computes in. `num_state_slots`: the number of sequences whose recurrent states it holds. `num_window_blocks`: the
    blocks of the layers with windows; 0: `num_blocks` too.
    """
    if formats is None:
        formats = [(Unquantised(), Unquantised())] * len(layers)
    next_formats = iter(formats)

    def paged(format: KVFormat, count: int, num_heads: int, channels: int) -> PagedVectors:
        size = (count, block_size, num_heads)
        # The values of a latent (MLA) cache have no channels, so there is nothing to quantise.
        return allocate(format if channels else Unquantised(), size, channels, dtype, device)

    def attention_part(heads: Heads, count: int) -> LayerCache:
        of_keys, of_values = next(next_formats)
        return (
            paged(of_keys, count, heads.num_key_value_heads, heads.head_dim),
            paged(of_values, count, heads.num_key_value_heads, heads.value_head_dim),
        )

    def of_layer(layer: CacheContent) -> AnyCache:
        sizes = [((num_state_slots, *state.shape), state.dtype or dtype) for state in layer.states]
        states = LayerState(tuple(torch.empty(size, dtype=kind, device=device) for size, kind in sizes))
        count = num_blocks if layer.window is None else num_window_blocks or num_blocks
        return join_cache(None if layer.heads is None else attention_part(layer.heads, count), states)

    caches = [of_layer(layer) for layer in layers]
    windowed = [layer.window is not None for layer in layers] if num_window_blocks else []
    return KVCache(caches, num_blocks, block_size, dtype, num_state_slots, num_window_blocks, windowed)


def unsharded_token(content: CacheContent, cache: KVCache) -> dict[str, Tensor]:
    """Return the keys and values [G, *] of a token in another stage's layer, by part, on the meta device.

    All layers of `cache`, which is this stage's, and of the other stages have the same format.
    """
    if content.heads is None:
        return {}
    keys, values = cache.attention_layers[0]
    # Static formats have a scale for each head of this stage's first layer.
    like_first = replace(content.heads, num_key_value_heads=keys.tensors[0].shape[2])
    formats = [(keys.format, values.format)]
    one = allocate_kv_cache([CacheContent(like_first)], 1, 1, formats, cache.dtype, torch.device("meta"))
    return {
        f"{name}.{part}": tensor[0, 0, :1].expand(content.heads.whole_keys, *tensor.shape[3:])
        for name, vectors in zip(("keys", "values"), one.attention_layers[0], strict=True)
        for part, tensor in enumerate(vectors.tensors)
    }


@dataclass(frozen=True)
class CacheRoom:
    """The memory that one rank has for its cache, in bytes."""

    num_bytes: int
    bytes_per_token: int
    """0 in a pipeline stage without attention layers."""
    bytes_per_slot: int
    """0 in a pipeline stage without recurrent layers."""
    window_bytes_per_token: int = 0
    """Of the layers with windows. `bytes_per_token` does not include them."""

    def num_window_blocks(self, block_size: int, blocks_per_window: int) -> int:
        """Return the blocks of one window for each TOKENS_PER_WINDOW tokens that the other layers have blocks for."""
        share = blocks_per_window * block_size / TOKENS_PER_WINDOW
        return int(share * self.num_bytes / (block_size * (self.bytes_per_token + share * self.window_bytes_per_token)))

    def with_window_blocks(self, num_window_blocks: int, block_size: int) -> "CacheRoom":
        """Return what the layers with windows leave to the others. 0: all layers have the same blocks."""
        size = self.window_bytes_per_token
        if not num_window_blocks:
            return CacheRoom(self.num_bytes, self.bytes_per_token + size, self.bytes_per_slot)
        return CacheRoom(
            self.num_bytes - num_window_blocks * block_size * size, self.bytes_per_token, self.bytes_per_slot
        )

    def num_blocks(self, block_size: int, num_slots: int) -> int:
        """Return the number of blocks that fit into the memory that this number of slots leaves. A token needs bytes."""
        return (self.num_bytes - num_slots * self.bytes_per_slot) // (block_size * self.bytes_per_token)

    def num_slots(self, block_size: int, wanted_slots: int, has_blocks: bool = True) -> int:
        """Return the number of slots: at most `wanted_slots` for sequences, and further slots for snapshots.

        The sequences' slots take at most half of the memory. Of the rest, snapshots take at most a third, and one slot
        per TOKENS_PER_SNAPSHOT tokens. The slots leave memory for one block. `has_blocks`: whether blocks need memory on
        any rank; if not, snapshots take all of the rest.
        """
        size = self.bytes_per_slot
        num_slots = min(wanted_slots, self.num_bytes // 2 // size)
        rest = self.num_bytes - num_slots * size
        share = rest // 3 if has_blocks else rest
        num_snapshots = min(share // size, rest // (TOKENS_PER_SNAPSHOT * self.bytes_per_token + size))
        return min(num_slots + num_snapshots, (self.num_bytes - block_size * self.bytes_per_token) // size)


def cache_room(cache: KVCache, memory: str, free: int, num_ranks: int = 1, num_sharing: int = 1) -> CacheRoom:
    """Return this rank's part of `device.kv_cache_memory` (`memory`) with `free` bytes free.

    `cache`: one block and one slot of this rank's layers. `num_ranks` ranks share a size in bytes equally.
    `num_sharing`: number of ranks that share this device's free bytes. Raises UserError if the size is less than one
    block and four slots, or more than the free bytes.
    """
    slot_bytes, block_bytes = cache.bytes_per_slot, cache.block_size * cache.bytes_per_token
    if memory == "auto":
        cache_bytes = int(AUTO_SHARE * free) // num_sharing
    else:
        everywhere = free * num_ranks // num_sharing  # assumes that all machines are equal
        cache_bytes, free = num_bytes(memory, everywhere) // num_ranks, free // num_sharing
    least = max(block_bytes, 1) + 4 * slot_bytes
    if not least <= cache_bytes <= free and (memory != "auto" or slot_bytes):
        contents = f"one block and 4 recurrent states of {slot_bytes:,} bytes" if slot_bytes else "one block"
        limits = f"from {least} ({contents}) to {free} (all free memory) bytes"
        raise UserError(f"device.kv_cache_memory={memory} does not fit: give {limits}, a fraction, or auto")
    window_bytes = cache.windowed.bytes_per_token
    return CacheRoom(cache_bytes, cache.bytes_per_token - window_bytes, slot_bytes, window_bytes)


def choose_window_blocks(
    rooms: Sequence[CacheRoom],
    block_size: int,
    blocks_per_window: int,
    needed_blocks: int,
    wanted_blocks: int,
    memory: str,
) -> int:
    """Return the number of blocks of the layers with windows; 0: as many as other layers have, which need no more.

    `needed_blocks`: enough for all requests, one step and the kept prompts. An automatic cache has no more. A cache whose
    size the user gives also keeps windows of earlier prompts. `wanted_blocks`: as for `choose_sizes`.
    """
    windowed = [room for room in rooms if room.window_bytes_per_token]
    if not windowed or any(room.bytes_per_slot for room in rooms):
        return 0
    together = [room.with_window_blocks(0, block_size) for room in rooms]
    equal = min(room.num_blocks(block_size, 0) for room in together if room.bytes_per_token)
    if memory == "auto":
        number, equal = needed_blocks, min(equal, wanted_blocks)
    else:
        number = max(needed_blocks, min(room.num_window_blocks(block_size, blocks_per_window) for room in windowed))
    has_other_layers = any(room.bytes_per_token for room in rooms)
    return number if needed_blocks < equal and (number < equal or not has_other_layers) else 0


def choose_sizes(
    rooms: Sequence[CacheRoom], block_size: int, wanted_blocks: int, wanted_slots: int, memory: str
) -> tuple[int, int]:
    """Return the numbers of blocks and of state slots that fit on every rank.

    An automatic cache has at most `wanted_blocks`, and one snapshot per TOKENS_PER_SNAPSHOT of their tokens. So has a
    cache whose blocks need no memory, with at most MOST_EMPTY_BLOCKS. A model without recurrent layers has no slots.
    """
    has_blocks = any(room.bytes_per_token for room in rooms)
    with_states = [room for room in rooms if room.bytes_per_slot]
    num_slots = min((room.num_slots(block_size, wanted_slots, has_blocks) for room in with_states), default=0)
    if memory == "auto":
        num_slots = min(num_slots, wanted_slots + wanted_blocks * block_size // TOKENS_PER_SNAPSHOT)
    num_blocks = [room.num_blocks(block_size, num_slots) for room in rooms if room.bytes_per_token]
    if memory == "auto" or not num_blocks:
        return max(1, min(wanted_blocks, *(num_blocks or [MOST_EMPTY_BLOCKS]))), num_slots
    return min(num_blocks), num_slots


def slot_cost(cache: KVCache) -> str:
    """Return what one of the cache's state slots costs, for a user; empty if no layer is recurrent."""
    if not cache.states:
        return ""
    cost = f"{cache.bytes_per_slot / 1e6:,.2f} MB"
    if cache.bytes_per_token:
        cost += f" = {cache.bytes_per_slot // cache.bytes_per_token:,} tokens of KV"
    return f"1 slot of recurrent states = {cost}; {cache.num_slots} slots"


def window_memory(cache: KVCache) -> str:
    """Return the sizes of the cache's two kinds of blocks, for a user; empty if all layers have the same blocks."""
    if not cache.num_window_blocks:
        return ""
    sizes = (
        (cache.num_blocks, cache.unwindowed.bytes_per_token),
        (cache.num_window_blocks, cache.windowed.bytes_per_token),
    )
    blocks = [f"{count:,} blocks = {count * cache.block_size * size / 1e6:,.1f} MB" for count, size in sizes]
    return f"KV cache: {blocks[0]} of layers with full attention; {blocks[1]} of layers with sliding windows"


def state_manager_of(cache: KVCache, is_recurrent: bool) -> StateManager:
    """Return the manager of the cache's state slots. A state that is cheaper than MIN_TOKENS of KV is saved more often.

    `is_recurrent`: whether the model has recurrent layers. If not, the slots are of its draft model, which manages them.
    """
    if not is_recurrent:
        return StateManager(0)
    return StateManager(cache.num_slots, saves_outputs=cache.bytes_per_slot < MIN_TOKENS * cache.bytes_per_token)


def window_blocks_of(cache: KVCache, window: int | None, max_batched_tokens: int) -> WindowBlocks:
    """Return the manager of the blocks of layers with windows, of which `window` is the longest. None: no layer has one."""
    return WindowBlocks(cache.num_window_blocks, cache.block_size, window or 1, max_batched_tokens)


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
