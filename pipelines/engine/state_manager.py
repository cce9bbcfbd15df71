"""Allocation and reference counts of the slots that hold the recurrent states of sequences, and their snapshots.

Imports no torch. A slot holds the states of one sequence in all recurrent layers. A sequence that forks shares its slot
until its next step, which writes another slot. A snapshot is a slot that no step writes any more: the state after a
full block, found by the block's hash, as the prefix cache finds the block. A prompt that begins with the same tokens
reads the snapshot in its first step. Saving and reading a snapshot copies nothing.
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
    """Slots with reference counts. Invariant: empty + cached + owned == all. Cached: a snapshot that no sequence owns.

    `_evict` chooses the snapshot that makes place: first a snapshot whose own continuation is saved too, then the least
    recently used. Snapshots that several prompts read stay as long as they are at most half of all.
    """

    def __init__(self, num_slots: int, saves_outputs: bool = False) -> None:
        """`num_slots`: 0 for a model without recurrent layers.

        `saves_outputs`: whether each full block of an output leaves a snapshot, which is worth it for small states.
        """
        self.num_slots = num_slots
        self.saves_outputs = saves_outputs
        self._empty = list(range(num_slots - 1, -1, -1))  # a stack
        self._owners = [0] * num_slots
        self._hash_of: dict[int, bytes] = {}
        self._slot_of: dict[bytes, int] = {}
        self._adapter_of: dict[int, str] = {}
        self._cached: dict[int, None] = {}  # least recently used first
        self._pinned: list[int] = []
        self._num_hits = Counter[int]()
        self._superseded = set[int]()

    @staticmethod
    def num_needed(num_sequences: int) -> int:
        """Return the most slots that a request of this number of sequences owns at once.

        A step may read one slot of each sequence, which others share or which is a snapshot, and write another one.
        """
        return 2 * num_sequences

    def take(self, owned: list[int], is_started: bool) -> StateSlots | None:
        """Return the slots of a sequence's next step; None without recurrent layers.

        `owned`, its slots, receives a slot that the step may write. `is_started`: whether its first tokens are
        computed. The scheduler admits no more requests than have slots.
        """
        if not self.num_slots:
            return None
        if not owned or self._owners[owned[-1]] > 1 or owned[-1] in self._hash_of:
            owned.append(self._empty.pop() if self._empty else self._evict())
            self._owners[owned[-1]] = 1
        return StateSlots(owned[0] if is_started else -1, owned[-1])

    @property
    def num_free_slots(self) -> int:
        """Slots that hold no sequence's state and are not pinned."""
        return len(self._empty) + len(self._cached)

    @property
    def num_unpinned_slots(self) -> int:
        return self.num_slots - len(self._pinned)

    def pin(self, value: bytes) -> int:
        """Return a slot that stays a snapshot with this hash. The caller must check `num_free_slots` first."""
        slots = list[int]()
        self.take(slots, is_started=False)
        self._pinned += slots
        self.remember(slots[0], value)
        return slots[0]

    def share(self, owned: Iterable[int]) -> None:
        """Add an owner to a snapshot that `find` returned, or to the slots of a sequence that is forked."""
        for slot in owned:
            self._owners[slot] += 1
            self._cached.pop(slot, None)

    def find(self, hashes: list[bytes]) -> tuple[int, list[int]]:
        """Return the number of blocks before the last snapshot among these hashes, and its slot; (0, []) if none.

        The caller does not own the slot yet.
        """
        for depth in range(len(hashes), 0, -1):
            if (slot := self._slot_of.get(hashes[depth - 1])) is not None:
                return depth, [slot]
        return 0, []

    def remember(self, slot: int, value: bytes, adapter: str | None = None) -> None:
        """Make the caller's slot a snapshot. An earlier snapshot with this hash stays, as if it were just used.

        `adapter`: the digest of the adapter that the state was computed with.
        """
        earlier = self._slot_of.setdefault(value, slot)
        if earlier == slot:
            self._hash_of[slot] = value
            if adapter is not None:
                self._adapter_of[slot] = adapter
            return
        self._superseded.discard(earlier)
        if earlier in self._cached:
            del self._cached[earlier]
            self._cached[earlier] = None

    def supersede(self, value: bytes) -> None:
        """Record that a snapshot's own continuation is saved too. If the snapshot is unknown, do nothing."""
        if value in self._slot_of:
            self._superseded.add(self._slot_of[value])

    def drop(self, value: bytes) -> None:
        """Empty the slot of a snapshot, unless a sequence owns it or has read it."""
        slot = self._slot_of.get(value)
        if slot in self._cached and not self._num_hits[slot]:
            self._forget(slot)
            self._empty.append(slot)

    def forget(self, adapter: str) -> None:
        """Empty the slots of an adapter's snapshots. No request may use the adapter."""
        for slot in [slot for slot, digest in self._adapter_of.items() if digest == adapter]:
            self._forget(slot)
            self._empty.append(slot)

    def count_hits(self, slots: list[int]) -> None:
        """Record that an admitted sequence reads these snapshots."""
        self._num_hits.update(slots)

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
            if slot in self._hash_of:
                self._cached[slot] = None
            else:
                self._empty.append(slot)

    def _evict(self) -> int:
        seldom = [slot for slot in self._cached if self._num_hits[slot] < 2]
        protects = 2 * (len(self._cached) - len(seldom)) <= self.num_slots
        candidates = seldom if seldom and protects else list(self._cached)
        slot = next((slot for slot in seldom if slot in self._superseded), candidates[0])
        self._forget(slot)
        return slot

    def _forget(self, slot: int) -> None:
        del self._cached[slot], self._slot_of[self._hash_of.pop(slot)], self._num_hits[slot]
        self._superseded.discard(slot)
        self._adapter_of.pop(slot, None)

    def check_integrity(self, owned: Iterable[list[int]]) -> None:
        """Raise RuntimeError unless reference counts match the sequences' slots, and each slot has exactly one state."""
        counts = Counter(slot for slots in [*owned, self._pinned] for slot in slots)
        if any(self._owners[slot] != counts[slot] for slot in range(self.num_slots)):
            raise RuntimeError("reference counts of state slots differ from what the sequences own")
        if sorted([*self._empty, *self._cached, *counts]) != list(range(self.num_slots)):
            numbers = f"{len(self._empty)} empty, {len(self._cached)} cached, {len(counts)} owned"
            raise RuntimeError(f"state slots do not add up: {numbers}")
        if {slot: value for value, slot in self._slot_of.items()} != self._hash_of:
            raise RuntimeError("snapshots and their hashes do not match")
        if (
            not self._cached.keys() | self._superseded | self._num_hits.keys() | self._adapter_of.keys()
            <= self._hash_of.keys()
        ):
            raise RuntimeError("a cached, superseded or counted slot, or a slot of an adapter, has no hash")
