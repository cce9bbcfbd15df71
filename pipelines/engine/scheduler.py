"""Which sequences run in the next step, and with how many tokens: first come, first served, continuously batched, prompts in chunks."""

from collections import deque
from dataclasses import dataclass

from pipelines.engine.block_manager import BlockManager, extend_hashes
from pipelines.engine.request import Sequence


@dataclass(frozen=True)
class Scheduled:
    sequence: Sequence
    num_new_tokens: int
    """The next tokens of the sequence that are not in the cache yet."""

    @property
    def samples(self) -> bool:
        """Whether the sequence's last token is among them, so that a new one follows."""
        return self.sequence.num_computed_tokens + self.num_new_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True)
class StepPlan:
    scheduled: list[Scheduled]


class Scheduler:
    """Plans steps of at most `max_batched_tokens` tokens over at most `max_num_sequences` sequences.

    Every sequence that generates gets its one token; the rest of the budget is shared evenly by the prompts, so that a long one
    stalls nobody. A sequence is admitted when the pool holds all it has so far; when it grows and no block is left, the
    last admitted one gives its blocks up and starts again later (preemption by recomputation).
    """

    def __init__(self, block_manager: BlockManager, max_num_sequences: int, max_batched_tokens: int) -> None:
        assert max_num_sequences <= max_batched_tokens  # so that everyone who runs gets at least a token
        self.block_manager = block_manager
        self.max_num_sequences = max_num_sequences
        self.max_batched_tokens = max_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> StepPlan:
        if self._grow():
            while self.waiting and len(self.running) < self.max_num_sequences and self._admit(self.waiting[0]):
                self.running.append(self.waiting.popleft())
        budget = self.max_batched_tokens
        num_new_tokens = {}
        by_need = sorted(self.running, key=lambda sequence: sequence.num_uncomputed_tokens)
        for i, sequence in enumerate(by_need):
            share = budget // (len(by_need) - i)
            num_new_tokens[sequence] = min(sequence.num_uncomputed_tokens, share)
            budget -= num_new_tokens[sequence]
        return StepPlan([Scheduled(sequence, num_new_tokens[sequence]) for sequence in self.running])

    def commit(self, item: Scheduled) -> None:
        """The item's tokens are in the cache now: blocks that became full can be found by later prompts."""
        sequence, blocks = item.sequence, self.block_manager
        before = sequence.num_computed_tokens // blocks.block_size
        sequence.num_computed_tokens += item.num_new_tokens
        if sequence.request.params.prefix_cache:
            full = sequence.num_computed_tokens // blocks.block_size
            extend_hashes(sequence.block_hashes, sequence.token_ids, full, blocks.block_size)
            for i in range(before, full):
                blocks.remember(sequence.block_table[i], sequence.block_hashes[i])

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that finished or was cancelled, and take its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def check_integrity(self) -> None:
        self.block_manager.check_integrity(sequence.block_table for sequence in self.running)

    def _grow(self) -> bool:
        """Give every running sequence the blocks for its tokens. False if some had to give up theirs."""
        preempted = False
        for sequence in list(self.running):
            while sequence in self.running and (missing := self._num_missing_blocks(sequence)):
                if missing <= self.block_manager.num_free_blocks:
                    sequence.block_table += self.block_manager.allocate(missing)
                else:
                    victim = self.running.pop()
                    self._release(victim)
                    self.waiting.appendleft(victim)
                    preempted = True
        return not preempted

    def _admit(self, sequence: Sequence) -> bool:
        """Take over what the cache knows of the sequence's beginning and allocate the rest; False if the pool cannot hold it."""
        blocks = self.block_manager
        if sequence.request.params.prefix_cache:
            # At least one token is computed again, because its logits are wanted.
            num_blocks = (len(sequence.token_ids) - 1) // blocks.block_size
            extend_hashes(sequence.block_hashes, sequence.token_ids, num_blocks, blocks.block_size)
            sequence.block_table = blocks.find_prefix(sequence.block_hashes[:num_blocks])
            blocks.share(sequence.block_table)
        missing = self._num_missing_blocks(sequence)
        if missing > blocks.num_free_blocks:
            self._release(sequence)
            return False
        sequence.num_computed_tokens = len(sequence.block_table) * blocks.block_size
        if sequence.num_cached_tokens is None:  # what is found after a preemption, it had computed itself
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.block_table += blocks.allocate(missing)
        return True

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        return self.block_manager.num_blocks_for(len(sequence.token_ids)) - len(sequence.block_table)

    def _release(self, sequence: Sequence) -> None:
        self.block_manager.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
