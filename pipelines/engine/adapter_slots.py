"""Which adapters are resident in the slots of the model's tables, and which of these are in use."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterId:
    """An adapter by its name and its content: another one under the same name is not equal."""

    name: str
    digest: str
    """sha256 of its files' content."""


class AdapterSlots:
    """Slots of adapters. One that nobody uses stays until its slot is needed: the least recently used goes first."""

    def __init__(self, num_slots: int, fill: Callable[[int, AdapterId], None]) -> None:
        """`fill` puts an adapter into a slot of the tables."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._fill = fill
        self._resident: dict[AdapterId, int] = {}  # in the order of their last use
        self._users: Counter[AdapterId] = Counter()

    @property
    def resident(self) -> list[AdapterId]:
        """Adapters that are in a slot, the last used one last."""
        return list(self._resident)

    def acquire(self, adapter: AdapterId) -> int | None:
        """Return the slot of an adapter, which stays there until it is released as often; None while all slots are in use."""
        slot = self._resident.pop(adapter, None)
        if slot is None:
            if not self._free:
                idle = next((each for each in self._resident if not self._users[each]), None)
                if idle is None:
                    return None
                self.forget(idle)
            slot = self._free.pop()
            self._fill(slot, adapter)
        self._resident[adapter] = slot
        self._users[adapter] += 1
        return slot

    def release(self, adapter: AdapterId) -> None:
        """End one use of an adapter."""
        self._users[adapter] -= 1

    def forget(self, adapter: AdapterId) -> None:
        """Free the slot of an adapter that nobody uses, if it has one."""
        assert not self._users[adapter]
        if adapter in self._resident:
            self._free.append(self._resident.pop(adapter))
