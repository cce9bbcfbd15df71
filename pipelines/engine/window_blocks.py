"""The blocks of the layers with sliding windows. A sequence keeps only the blocks that its next tokens attend to.

A sequence's `window_table` has an entry for each of its tokens' blocks, as `block_table` has for the other layers. The
entries before `window_start` are 0: these blocks are released.
"""

from collections.abc import Collection, Iterable

from pipelines.engine.block_manager import BlockManager
from pipelines.engine.request import Sequence

TILE = 64
"""The kernels read keys in tiles that begin at multiples of this number. They may read keys before the window."""


def blocks_per_sequence(window: int, block_size: int) -> int:
    """Return the most blocks that a sequence owns between two steps, and one that a fork copies."""
    return -(-(window + TILE) // block_size) + 3  # a part of a block at both ends


class WindowBlocks:
    """Blocks for at least as many sequences as the scheduler admits (`max_sequences`), so that `extend` never lacks one.

    Released blocks stay in the prefix cache until they are evicted. A prompt can begin with cached blocks of the other
    layers if the last window before its first computed token is cached here. Pinned blocks reduce `max_sequences`.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int, max_batched_tokens: int) -> None:
        """`num_blocks`: 0 if all layers have the same blocks. `window`: the longest window of a layer, in tokens.

        `max_batched_tokens`: the most tokens of the steps in flight.
        """
        self.num_blocks = num_blocks
        self._window = window
        self._blocks = BlockManager(num_blocks, block_size)
        self._num_per_sequence = blocks_per_sequence(window, block_size)
        self._num_for_sequences = num_blocks - self._blocks.num_blocks_for(max_batched_tokens)

    @property
    def max_sequences(self) -> int | None:
        """The most sequences that may run; None: any number."""
        return self._num_for_sequences // self._num_per_sequence if self.num_blocks else None

    @property
    def num_pinnable_blocks(self) -> int:
        """Blocks that can be pinned while one sequence can still run."""
        return max(0, self._num_for_sequences - self._num_per_sequence)

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        return self._blocks.allocate(num_blocks)

    def free(self, blocks: list[int]) -> None:
        self._blocks.free(blocks)

    def pin(self, hashes: Collection[bytes]) -> list[int]:
        """Return blocks that stay in the prefix cache under these hashes, at most `num_pinnable_blocks`."""
        blocks = self._blocks.allocate(len(hashes))
        self._blocks.pin(blocks)
        for block, value in zip(blocks, hashes, strict=True):
            self._blocks.remember(block, value)
        self._num_for_sequences -= len(blocks)
        return blocks

    def extend(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Give a sequence blocks for its first `num_tokens` tokens, which it alone owns from its next token on.

        Returns the source and the target of the copy of a partly filled block that it shared.
        """
        if not self.num_blocks:
            return []
        blocks, table, copies = self._blocks, sequence.window_table, list[tuple[int, int]]()
        index, offset = divmod(sequence.num_computed_tokens, blocks.block_size)
        if offset and blocks.num_owners(table[index]) > 1:
            (copy,) = blocks.allocate(1)
            blocks.free([table[index]])
            copies, table[index] = [(table[index], copy)], copy
        if (missing := blocks.num_blocks_for(num_tokens) - len(table)) > 0:
            table += blocks.allocate(missing)
        return copies

    def trim(self, sequence: Sequence) -> None:
        """Release the blocks after the sequence's tokens."""
        surplus = sequence.window_table[self._blocks.num_blocks_for(len(sequence.token_ids)) :]
        self._blocks.free(surplus)
        del sequence.window_table[len(sequence.window_table) - len(surplus) :]

    def slide(self, sequence: Sequence) -> None:
        """Release the blocks before the window of the first token that is not computed."""
        first, start = self._first_block(sequence.num_computed_tokens), sequence.window_start
        if self.num_blocks and first > start:
            self._blocks.free(sequence.window_table[start:first])
            sequence.window_table[start:first] = [0] * (first - start)
            sequence.window_start = first

    def share(self, sequence: Sequence) -> None:
        """Add an owner to the sequence's blocks, which is forked."""
        self._blocks.share(sequence.window_table[sequence.window_start :])

    def release(self, sequence: Sequence) -> None:
        self._blocks.free(sequence.window_table[sequence.window_start :])
        sequence.window_table, sequence.window_start = [], 0

    def take(self, sequence: Sequence, num_cached: int) -> int:
        """Give a sequence the last window within its first `num_cached` blocks that is cached here.

        Returns the number of blocks before the window's end, all of which the sequence may use; 0 if there is none.
        """
        if not self.num_blocks:
            return num_cached
        cached = [self._blocks.find_prefix([value]) for value in sequence.block_hashes[:num_cached]]
        depth, num_in_row = 0, 0
        for end, block in enumerate(cached, 1):
            num_in_row = num_in_row + 1 if block else 0
            if end - num_in_row <= self._first_block(end * self._blocks.block_size):
                depth = end
        first = self._first_block(depth * self._blocks.block_size)
        window = [block for blocks in cached[first:depth] for block in blocks]
        self._blocks.share(window)
        sequence.window_table, sequence.window_start = [0] * first + window, first
        return depth

    def remember(self, sequence: Sequence, before: int, full: int, adapter: str | None) -> None:
        """Add the blocks from number `before` to `full` - 1, which are full, to the prefix cache.

        `adapter`: as in `BlockManager.remember`.
        """
        for i in range(max(before, sequence.window_start), full if self.num_blocks else 0):
            self._blocks.remember(sequence.window_table[i], sequence.block_hashes[i], adapter)

    def forget(self, adapter: str) -> None:
        """Remove an adapter's blocks from the prefix cache. No request may use the adapter."""
        self._blocks.forget(adapter)

    def _first_block(self, num_computed: int) -> int:
        """Return the number of the first block that the token after `num_computed` tokens attends to."""
        first = max(0, num_computed - self._window + 1)
        return first // TILE * TILE // self._blocks.block_size

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless every block is free, or has as many owners as it counts."""
        self._blocks.check_integrity(sequence.window_table[sequence.window_start :] for sequence in sequences)
