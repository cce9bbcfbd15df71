"""The slots of the model's adapter tables: which adapters are resident, and which of them are in use."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterId:
    """An adapter's name and content digest. A new adapter under an old name is not equal to the old one."""

    name: str
    digest: str
    """sha256 of the content of the adapter's files."""


class AdapterSlots:
    """A fixed number of adapter slots.

    An unused adapter stays resident until its slot is needed; the least recently used is evicted first. A pinned
    adapter is never evicted.
    """

    def __init__(self, num_slots: int, fill: Callable[[int, AdapterId], None]) -> None:
        """`fill` writes an adapter into a slot of the tables."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._fill = fill
        self._resident: dict[AdapterId, int] = {}  # least recently used first
        self._users: Counter[AdapterId] = Counter()
        self._pinned: set[AdapterId] = set()

    @property
    def resident(self) -> list[AdapterId]:
        """Return the adapters that occupy a slot, least recently used first."""
        return list(self._resident)

    def acquire(self, adapter: AdapterId) -> int | None:
        """Return the adapter's slot and count one more user, or return None if all slots are in use.

        The adapter keeps its slot until `release` was called as often as `acquire`.
        """
        slot = self._resident.pop(adapter, None)
        if slot is None:
            if not self._free:
                idle = next(filter(self._is_evictable, self._resident), None)
                if idle is None:
                    return None
                self.forget(idle)
            slot = self._free.pop()
            self._fill(slot, adapter)
        self._resident[adapter] = slot
        self._users[adapter] += 1
        return slot

    def release(self, adapter: AdapterId) -> None:
        self._users[adapter] -= 1

    def pin(self, adapter: AdapterId) -> None:
        """Keep the adapter resident from its first use until `forget`.

        An adapter waits forever if the pinned adapters have all slots.
        """
        self._pinned.add(adapter)

    def forget(self, adapter: AdapterId) -> None:
        """Free the adapter's slot, if it has one. The adapter must be unused."""
        assert not self._users[adapter]
        self._pinned.discard(adapter)
        if adapter in self._resident:
            self._free.append(self._resident.pop(adapter))

    def _is_evictable(self, adapter: AdapterId) -> bool:
        return not self._users[adapter] and adapter not in self._pinned
