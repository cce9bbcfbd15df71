"""The pool of key/value blocks: how many fit, and their memory."""

import os

import torch

from models.batch import KVCache
from models.registry import ModelShape

BLOCK_SIZE = 16  # token slots in a block
MEMORY_SHARE = 0.5  # of the memory that is free when the pool is made, at most


def allocate_kv_cache(shape: ModelShape, num_blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Zeroed, but on a CPU no page is taken before it is written."""
    size = (num_blocks, BLOCK_SIZE, shape.num_key_value_heads, shape.head_dim)
    keys, values = (
        [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_hidden_layers)] for _ in range(2)
    )
    return KVCache(keys, values)


def choose_num_blocks(
    shape: ModelShape, max_num_sequences: int, context_length: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Enough for `max_num_sequences` sequences of full length, or as many as half of the free memory holds."""
    wanted = max_num_sequences * -(-context_length // BLOCK_SIZE)
    block_bytes = 2 * shape.num_hidden_layers * BLOCK_SIZE * shape.num_key_value_heads * shape.head_dim * dtype.itemsize
    return max(1, min(wanted, int(MEMORY_SHARE * _free_memory(device)) // block_bytes))


def _free_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
