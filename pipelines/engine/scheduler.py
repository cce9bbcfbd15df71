"""Which sequences run in the next step, and with how many tokens: first come, first served, continuously batched."""

from collections import deque
from dataclasses import dataclass

from pipelines.engine.block_manager import BlockManager
from pipelines.engine.request import Sequence


@dataclass(frozen=True)
class Scheduled:
    sequence: Sequence
    num_new_tokens: int
    """The last tokens of the sequence that are not in the cache yet."""


@dataclass(frozen=True)
class StepPlan:
    scheduled: list[Scheduled]


class Scheduler:
    """A sequence is admitted when a place is free and the pool has the most blocks that it can ever need, so it never has to stop.

    A finished sequence's place and blocks go to the next one in the same step's plan.
    """

    def __init__(self, block_manager: BlockManager, max_num_sequences: int) -> None:
        self.block_manager = block_manager
        self.max_num_sequences = max_num_sequences
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> StepPlan:
        while self.waiting and len(self.running) < self.max_num_sequences:
            num_blocks = self.block_manager.num_blocks_for(self.waiting[0].max_num_tokens)
            if num_blocks > self.block_manager.num_free_blocks:
                break
            sequence = self.waiting.popleft()
            sequence.block_table = self.block_manager.allocate(num_blocks)
            self.running.append(sequence)
        return StepPlan([Scheduled(s, len(s.token_ids) - s.num_computed_tokens) for s in self.running])

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that finished or was cancelled, and take its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.block_manager.free(sequence.block_table)
            sequence.block_table = []
        else:
            self.waiting.remove(sequence)

    def check_integrity(self) -> None:
        self.block_manager.check_integrity(sequence.block_table for sequence in self.running)
