"""Allocation and reference counts of the slots that hold the recurrent states of sequences. Imports no torch.

A slot holds the states of one sequence in all recurrent layers. A sequence that forks shares its slot until its next
step, which writes another slot.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class StateSlots(NamedTuple):
    """The slots of a sequence in one step."""

    read: int
    """The state before the step. -1: the sequence begins with this step."""
    write: int
    """The state after the step. -1: it is not kept."""


class StateManager:
    """Slots with reference counts. Invariant: empty + owned == all."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots`: 0 for a model without recurrent layers."""
        self.num_slots = num_slots
        self._empty = list(range(num_slots - 1, -1, -1))  # a stack
        self._owners = [0] * num_slots

    @staticmethod
    def num_needed(num_sequences: int) -> int:
        """Return the most slots that a request of this number of sequences owns at once.

        In the step after a fork, each sequence may write a slot of its own while all their old slots are read.
        """
        return 1 if num_sequences == 1 else 2 * num_sequences

    def take(self, owned: list[int], is_started: bool) -> StateSlots | None:
        """Return the slots of a sequence's next step; None without recurrent layers.

        `owned`, its slots, receives a slot that no other sequence owns. `is_started`: whether its first tokens are
        computed. The scheduler admits no more requests than have slots.
        """
        if not self.num_slots:
            return None
        if not owned or self._owners[owned[-1]] > 1:
            owned.append(self._empty.pop())
            self._owners[owned[-1]] = 1
        return StateSlots(owned[0] if is_started else -1, owned[-1])

    def share(self, owned: list[int]) -> None:
        """Add an owner to the slots of a sequence that is forked."""
        for slot in owned:
            self._owners[slot] += 1

    def keep_last(self, owned: list[int]) -> None:
        """Release all slots of a sequence but the one that its last step has written."""
        while len(owned) > 1:
            self._release(owned.pop(0))

    def free(self, owned: list[int]) -> None:
        """Release all slots of a sequence."""
        while owned:
            self._release(owned.pop())

    def _release(self, slot: int) -> None:
        self._owners[slot] -= 1
        if not self._owners[slot]:
            self._empty.append(slot)

    def check_integrity(self, owned: Iterable[list[int]]) -> None:
        """Raise RuntimeError unless reference counts match the sequences' slots, and all other slots are empty."""
        counts = Counter(slot for slots in owned for slot in slots)
        if any(self._owners[slot] != counts[slot] for slot in range(self.num_slots)):
            raise RuntimeError("reference counts of state slots differ from what the sequences own")
        if sorted([*self._empty, *counts]) != list(range(self.num_slots)):
            raise RuntimeError(f"state slots do not add up: {len(self._empty)} empty, {len(counts)} owned")
