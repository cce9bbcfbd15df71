"""Allocation and reference counts of the KV cache's blocks, and the prefix cache.

A block is in one of three states: empty (holds nothing), cached (full, not owned, found by its hash) or used (owned by
one or more sequences). Invariant: empty + cached + used == all. Empty and cached blocks are free.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Protocol


class BlockTiers(Protocol):
    """Slower memory for the contents of evicted blocks, which it finds by their hashes."""

    def save(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Copy the contents of these blocks, which the cache is about to overwrite."""

    def load(self, hashes: list[bytes], blocks: list[int]) -> int:
        """Copy the contents of the longest prefix of `hashes` that is here into the first blocks; return its length."""

    def close(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Save the contents of these blocks, last used first, where a later process finds them. No call follows."""

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each place for a block is free or holds one block."""


class BlockManager:
    """Blocks with reference counts. Cached blocks are evicted least recently used first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: at first the lowest number is on top, later the last freed block.
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._adapter_of: dict[int, str] = {}
        self._cached: dict[int, None] = {}  # least recently used first
        self._pinned: list[int] = []
        self.tiers: BlockTiers | None = None
        """Where evicted blocks go; None: nowhere."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can return: the empty blocks, and the cached blocks, which it evicts."""
        return len(self._empty) + len(self._cached)

    @property
    def num_empty_blocks(self) -> int:
        """Blocks that `allocate` can return without an eviction."""
        return len(self._empty)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return `num_blocks` blocks whose only owner is the caller. The caller must check `num_free_blocks` first."""
        assert num_blocks <= self.num_free_blocks
        num_evicted = max(0, num_blocks - len(self._empty))
        blocks = [self._empty.pop() for _ in range(num_blocks - num_evicted)] + self._evict(num_evicted)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def pin(self, blocks: list[int]) -> None:
        """Keep the caller's blocks allocated permanently."""
        self._pinned += blocks

    def find_prefix(self, hashes: list[bytes]) -> list[int]:
        """Return the cached blocks that match the longest prefix of `hashes`. The caller does not own them yet."""
        blocks = []
        for value in hashes:
            if value not in self._block_of:
                break
            blocks.append(self._block_of[value])
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add an owner to blocks that `find_prefix` returned, or to the blocks of a sequence that is forked."""
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)

    def num_owners(self, block: int) -> int:
        return self._references[block]

    def remember(self, block: int, value: bytes, adapter: str | None = None) -> None:
        """Add a full, computed block to the prefix cache. If another block has this hash already, that block stays.

        `adapter`: the digest of the adapter that the block was computed with.
        """
        if value not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = value
            self._block_of[value] = block
            if adapter is not None:
                self._adapter_of[block] = adapter

    def forget(self, adapter: str) -> None:
        """Remove an adapter's blocks from the prefix cache. No request may use the adapter."""
        for block in [block for block, digest in self._adapter_of.items() if digest == adapter]:
            self._forget(block)
            self._empty.append(block)

    def free(self, blocks: list[int]) -> None:
        """Release the caller's blocks.

        The last blocks are evicted first, because prompts more often share their beginning.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def load(self, hashes: list[bytes], blocks: list[int], adapter: str | None) -> int:
        """Fill the first of the caller's new blocks with the longest prefix of `hashes` in the tiers; return its length.

        `adapter`: as for `remember`.
        """
        num_loaded = self.tiers.load(hashes, blocks) if self.tiers and hashes else 0
        for block, value in zip(blocks[:num_loaded], hashes, strict=False):
            self.remember(block, value, adapter)
        return num_loaded

    def close_tiers(self) -> None:
        """Save the contents of all blocks of the prefix cache for a later process."""
        if self.tiers:
            used = [block for block in self._hash_of if block not in self._cached]
            blocks = [*used, *reversed(self._cached)]
            self.tiers.close(blocks, [self._hash_of[block] for block in blocks])
            self.tiers = None

    def _evict(self, num_blocks: int) -> list[int]:
        blocks = [*islice(self._cached, num_blocks)]
        hashes = [self._hash_of[block] for block in blocks]
        for block in blocks:
            self._forget(block)
        if self.tiers and blocks:
            self.tiers.save(blocks, hashes)
        return blocks

    def _forget(self, block: int) -> None:
        del self._cached[block], self._block_of[self._hash_of.pop(block)]
        self._adapter_of.pop(block, None)

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Raise RuntimeError unless reference counts match the tables and each block has exactly one state."""
        owned = Counter(block for table in [*block_tables, self._pinned] for block in table)
        if any(self._references[block] != owned[block] for block in range(self.num_blocks)):
            raise RuntimeError("reference counts differ from what the sequences own")
        if sorted([*self._empty, *self._cached, *owned]) != list(range(self.num_blocks)):
            num_empty, num_cached = len(self._empty), len(self._cached)
            counts = f"{num_empty} empty, {num_cached} cached, {len(owned)} used, {self.num_blocks} in all"
            raise RuntimeError(f"blocks do not add up: {counts}")
        if {block: value for value, block in self._block_of.items()} != self._hash_of:
            raise RuntimeError("hashes and blocks do not match")
        if not self._adapter_of.keys() <= self._hash_of.keys():
            raise RuntimeError("a block of an adapter has no hash")
        if self.tiers:
            self.tiers.check_integrity()
