"""Tiers below the KV cache: memory (`memory_tier.py`) and a file (`file_tier.py`), for the contents of evicted blocks.

A tier finds a content by the hash of its block (`block_hashes.py`). Contents are copied without a change. Each tier
evicts its least recently used content. A tier keeps a content that the cache loads, so a later eviction copies nothing.

Dimensions: N blocks of the cache, n chosen blocks, C bytes of a block in all layers.
"""

import torch
from torch import Tensor

from models.batch import KVCache
from pipelines.engine.file_tier import FileTier
from pipelines.engine.memory_tier import MemoryTier

CHUNK_BYTES = 2**26  # of contents that are copied at once


class KVTiers:
    """Copies evicted blocks of a cache into its tiers, and back into new blocks. Implements `BlockTiers`."""

    def __init__(self, cache: KVCache, memory: MemoryTier | None, file: FileTier | None) -> None:
        self._cache, self.memory, self.file = cache, memory, file
        self._tiers = [tier for tier in (memory, file) if tier is not None]  # fastest first
        self._chunk = max(1, CHUNK_BYTES // block_bytes(cache))

    def save(self, blocks: list[int], hashes: list[bytes]) -> None:
        wanted = [i for i, value in enumerate(hashes) if self._is_wanted(value)]
        for start in range(0, len(wanted), self._chunk):
            chunk = wanted[start : start + self._chunk]
            contents = read_blocks(self._cache, [blocks[i] for i in chunk])
            for i, content in zip(chunk, contents, strict=True):
                for tier in self._tiers:
                    if tier.wants(hashes[i]):
                        tier.put(hashes[i], content)

    def load(self, hashes: list[bytes], blocks: list[int]) -> int:
        num_loaded = 0
        while num_loaded < len(hashes):
            contents = self._find(hashes[num_loaded : num_loaded + self._chunk])
            if not contents:
                break
            write_blocks(self._cache, torch.stack(contents), blocks[num_loaded : num_loaded + len(contents)])
            num_loaded += len(contents)
        # The last blocks are used first, so that they are evicted first, as in the cache.
        for value in reversed(hashes[:num_loaded]):
            self._is_wanted(value)
        return num_loaded

    def close(self, blocks: list[int], hashes: list[bytes]) -> None:
        if self.file is None:
            return
        wanted = [i for i, value in enumerate(hashes[: self.file.num_contents]) if self.file.wants(value)]
        self.file.begin_last(len(wanted))
        for i in wanted:
            self.file.put_last(hashes[i], read_blocks(self._cache, [blocks[i]])[0])
        self.file.close()

    def check_integrity(self) -> None:
        for tier in self._tiers:
            tier.check_integrity()

    def _is_wanted(self, value: bytes) -> bool:
        return sum(tier.wants(value) for tier in self._tiers) > 0  # every tier notes the use

    def _find(self, hashes: list[bytes]) -> list[Tensor]:
        """Return the contents of the longest prefix of `hashes` that the tiers hold."""
        contents = []
        for value in hashes:
            content = next((found for tier in self._tiers if (found := tier.get(value)) is not None), None)
            if content is None:
                break
            contents.append(content)
        return contents


def block_bytes(cache: KVCache) -> int:
    """Return C."""
    return sum(tensor[0].nbytes for tensor in cache.tensors)


def read_blocks(cache: KVCache, blocks: list[int]) -> Tensor:
    """Return the contents of blocks, uint8 [n, C] on the CPU."""
    numbers = torch.tensor(blocks, device=cache.device)
    return torch.cat([tensor[numbers].flatten(1).view(torch.uint8) for tensor in cache.tensors], dim=1).cpu()


def write_blocks(cache: KVCache, contents: Tensor, blocks: list[int]) -> None:
    """Write contents, uint8 [n, C], to blocks."""
    numbers = torch.tensor(blocks, device=cache.device)
    parts = contents.to(cache.device).split([tensor[0].nbytes for tensor in cache.tensors], dim=1)
    for tensor, part in zip(cache.tensors, parts, strict=True):
        # A copy, because a part may begin at an address that is not aligned for the dtype.
        tensor[numbers] = part.clone().view(tensor.dtype).view(len(blocks), *tensor.shape[1:])
