"""Tiers below the KV cache: memory, and a file (`file_tier.py`), for the contents of evicted blocks.

A tier finds a content by the hash of its block (`block_hashes.py`). Contents are copied without a change. Each tier
evicts its least recently used content. A tier keeps a content that the cache loads, so a later eviction copies nothing.

Dimensions: N blocks of the cache, n chosen blocks, C bytes of a block in all layers.
"""

from typing import Protocol

import torch
from torch import Tensor

from models.batch import KVCache

CHUNK_BYTES = 2**26  # of contents that are copied at once


class Tier(Protocol):
    def wants(self, value: bytes) -> bool:
        """Return whether `put` should get the content of this hash. A content that is here becomes the last used."""

    def put(self, value: bytes, content: Tensor) -> None:
        """Copy a content, uint8 [C] on the CPU, that the tier wants."""

    def get(self, value: bytes) -> Tensor | None:
        """Return the content of this hash, valid until the next `put`; None: it is not here."""

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each place for a content is free or holds one content."""


class KVTiers:
    """Copies evicted blocks of a cache into its tiers, and back into new blocks. Implements `BlockTiers`."""

    def __init__(self, cache: KVCache, tiers: list[Tier]) -> None:
        """`tiers`: fastest first."""
        self._cache, self.tiers = cache, tiers
        self._chunk = max(1, CHUNK_BYTES // block_bytes(cache))

    def save(self, blocks: list[int], hashes: list[bytes]) -> None:
        wanted = [i for i, value in enumerate(hashes) if self._is_wanted(value)]
        for start in range(0, len(wanted), self._chunk):
            chunk = wanted[start : start + self._chunk]
            contents = read_blocks(self._cache, [blocks[i] for i in chunk])
            for i, content in zip(chunk, contents, strict=True):
                for tier in self.tiers:
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

    def check_integrity(self) -> None:
        for tier in self.tiers:
            tier.check_integrity()

    def _is_wanted(self, value: bytes) -> bool:
        return sum(tier.wants(value) for tier in self.tiers) > 0  # every tier notes the use

    def _find(self, hashes: list[bytes]) -> list[Tensor]:
        """Return the contents of the longest prefix of `hashes` that the tiers hold."""
        contents = []
        for value in hashes:
            content = next((found for tier in self.tiers if (found := tier.get(value)) is not None), None)
            if content is None:
                break
            contents.append(content)
        return contents


class MemoryTier:
    """A fixed number of contents in memory. The system assigns its pages when they are written."""

    def __init__(self, num_contents: int, num_bytes: int) -> None:
        """`num_bytes`: C."""
        self._contents = torch.empty(num_contents, num_bytes, dtype=torch.uint8)
        self._rows: dict[bytes, int] = {}  # least recently used first
        self._free = list(range(num_contents - 1, -1, -1))

    def wants(self, value: bytes) -> bool:
        row = self._rows.pop(value, None)
        if row is not None:
            self._rows[value] = row
        return row is None

    def put(self, value: bytes, content: Tensor) -> None:
        row = self._free.pop() if self._free else self._rows.pop(next(iter(self._rows)))
        self._contents[row] = content
        self._rows[value] = row

    def get(self, value: bytes) -> Tensor | None:
        row = self._rows.get(value)
        return None if row is None else self._contents[row]

    def check_integrity(self) -> None:
        check_places([*self._free, *self._rows.values()], len(self._contents), "the memory tier")


def check_places(places: list[int], num_places: int, tier: str) -> None:
    """Raise RuntimeError unless `places`, the free and the used ones, are each of `num_places` places once."""
    if sorted(places) != list(range(num_places)):
        raise RuntimeError(f"the places of {tier} do not add up: {len(places)} of {num_places}")


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
