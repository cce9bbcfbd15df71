"""The prefix cache: which computed tokens a sequence begins with, and which blocks and states it leaves to others."""

from collections.abc import Set

from pipelines.engine.block_hashes import extend_hashes, root_hash
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.request import Sequence
from pipelines.engine.snapshots import NO_SNAPSHOTS, place_snapshots
from pipelines.engine.state_manager import StateManager
from pipelines.engine.window_blocks import WindowBlocks


class PrefixCache:
    """Finds blocks by their hashes. In a model with recurrent layers a prefix ends where a snapshot of the state exists.

    A snapshot stays valid if its block is evicted: the hash names all its tokens. It is not found until the block is
    computed again.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        state_manager: StateManager,
        window_blocks: WindowBlocks,
        turn_end_ids: Set[int],
    ) -> None:
        self._blocks, self._windows = block_manager, window_blocks
        self._states = state_manager
        self._turn_end_ids = turn_end_ids

    def take(self, sequence: Sequence) -> None:
        """Give a sequence without computed tokens its prefix's blocks, the cached blocks after them, and a snapshot."""
        size, prefix, cached = self._blocks.block_size, sequence.prefix, list[int]()
        num_full = prefix.num_tokens // size
        sequence.snapshots, sequence.last_snapshot = NO_SNAPSHOTS, 0
        if _reads_cache(sequence):
            num_blocks = self._num_readable_blocks(sequence)
            self._extend_hashes(sequence, num_blocks)
            cached = self._blocks.find_prefix(sequence.block_hashes[num_full:num_blocks])
            if self._states.num_slots:
                cached = self._take_snapshot(sequence, cached)
            cached = cached[: self._windows.take(sequence, len(cached))]
        # The first cached block also has the prefix's last tokens. It replaces the prefix's partly filled block.
        sequence.block_table = [*prefix.blocks[:num_full], *cached] if cached else [*prefix.blocks]
        self._blocks.share(sequence.block_table)
        if cached:
            sequence.num_computed_tokens = len(sequence.block_table) * size - prefix.num_tokens

    def load(self, sequence: Sequence) -> bool:
        """Fill the sequence's blocks after its cached blocks from the tiers. Return whether any was filled."""
        if not _reads_cache(sequence):
            return False
        size, num_prefix_tokens = self._blocks.block_size, sequence.prefix.num_tokens
        first, end = (num_prefix_tokens + sequence.num_computed_tokens) // size, self._num_readable_blocks(sequence)
        hashes, blocks = sequence.block_hashes[first:end], sequence.block_table[first:end]
        num_loaded = self._blocks.load(hashes, blocks, _adapter(sequence))
        if num_loaded:
            sequence.num_computed_tokens = (first + num_loaded) * size - num_prefix_tokens
        return num_loaded > 0

    def _num_readable_blocks(self, sequence: Sequence) -> int:
        # At least one token is computed again, because its logits are needed.
        return (sequence.prefix.num_tokens + len(sequence.token_ids) - 1) // self._blocks.block_size

    def _take_snapshot(self, sequence: Sequence, cached: list[int]) -> list[int]:
        """Share the last snapshot within the cached blocks, and return the blocks before it.

        The tokens after it are computed again, into blocks of the sequence's own.
        """
        size, hashes = self._blocks.block_size, sequence.block_hashes
        depth, sequence.state_slots = self._states.find(hashes[: len(cached)])
        self._states.share(sequence.state_slots)
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        sequence.last_snapshot = depth * size
        sequence.snapshots = place_snapshots(prompt, self._turn_end_ids, size, len(cached) * size, depth * size)
        return cached[:depth]

    def remember(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Add the blocks to the cache that the last `num_new_tokens` computed tokens have filled, and the state."""
        if not sequence.params.prefix_cache:
            return
        size, num_tokens = self._blocks.block_size, sequence.prefix.num_tokens + sequence.num_computed_tokens
        before, full = (num_tokens - num_new_tokens) // size, num_tokens // size
        if full > before:
            self._extend_hashes(sequence, full)
            for i in range(before, full):
                self._blocks.remember(sequence.block_table[i], sequence.block_hashes[i], _adapter(sequence))
            self._windows.remember(sequence, before, full, _adapter(sequence))
            if self.saves_state(sequence, sequence.num_computed_tokens):
                self._save_state(sequence)

    def forget(self, adapter: str) -> None:
        """Remove what was computed with the adapter of this digest. No request may use the adapter."""
        for part in self._blocks, self._windows, self._states:
            part.forget(adapter)

    def saves_state(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether the state after this number of tokens becomes a snapshot."""
        if not self._states.num_slots or not sequence.params.prefix_cache or num_tokens % self._blocks.block_size:
            return False
        in_output = num_tokens >= sequence.num_prompt_tokens
        return num_tokens in sequence.snapshots.ends or (in_output and self._states.saves_outputs)

    def _save_state(self, sequence: Sequence) -> None:
        size, end, last = self._blocks.block_size, sequence.num_computed_tokens, sequence.last_snapshot
        hashes = sequence.block_hashes
        self._states.remember(sequence.state_slots[-1], hashes[end // size - 1], _adapter(sequence))
        # A snapshot of an output replaces none of the prompt: the next prompt may lack the output's reasoning. Small
        # states are not superseded: blocks are scarcer, and an evicted last block makes the earlier snapshot useful.
        if last >= sequence.num_prompt_tokens:
            self._states.drop(hashes[last // size - 1])
        elif last > sequence.snapshots.shared_end and not self._states.saves_outputs:
            self._states.supersede(hashes[last // size - 1])
        sequence.last_snapshot = end

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        root, num_prefix_tokens = root_hash(sequence), sequence.prefix.num_tokens
        extend_hashes(
            sequence.block_hashes, sequence.token_ids, num_blocks, self._blocks.block_size, root, num_prefix_tokens
        )


def _adapter(sequence: Sequence) -> str | None:
    """Return the digest of the sequence's adapter."""
    return sequence.request.adapter.digest if sequence.request.adapter else None


def _reads_cache(sequence: Sequence) -> bool:
    return sequence.params.prefix_cache and sequence.first_output_position is None
