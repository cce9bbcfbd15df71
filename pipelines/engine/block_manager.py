"""Who owns which block of the KV cache."""

from collections.abc import Iterable


class BlockManager:
    """A free list over `num_blocks` blocks of `block_size` token slots. Invariant: free + owned == all, no block owned twice."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest and the last freed go first

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks that now belong to the caller. The caller has checked num_free_blocks."""
        assert num_blocks <= len(self._free)
        return [self._free.pop() for _ in range(num_blocks)]

    def free(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Raises RuntimeError unless free blocks and `block_tables` together are every block exactly once."""
        blocks = self._free + [block for table in block_tables for block in table]
        if sorted(blocks) != list(range(self.num_blocks)):
            raise RuntimeError(
                f"blocks do not add up: {len(self._free)} free, {len(blocks) - len(self._free)} owned, {self.num_blocks} in all"
            )
