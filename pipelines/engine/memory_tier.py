"""The memory tier of the KV cache: contents of evicted blocks."""

import torch
from torch import Tensor


class MemoryTier:
    """A fixed number of contents in memory. The system assigns its pages when they are written."""

    def __init__(self, num_contents: int, num_bytes: int) -> None:
        """`num_bytes`: C, the bytes of a content."""
        self._contents = torch.empty(num_contents, num_bytes, dtype=torch.uint8)
        self._rows: dict[bytes, int] = {}  # least recently used first
        self._free = list(range(num_contents - 1, -1, -1))

    def wants(self, value: bytes) -> bool:
        """Return whether `put` should get the content of this hash. A content that is here becomes the last used."""
        row = self._rows.pop(value, None)
        if row is not None:
            self._rows[value] = row
        return row is None

    def put(self, value: bytes, content: Tensor) -> None:
        """Copy a content, uint8 [C] on the CPU, that the tier wants."""
        row = self._free.pop() if self._free else self._rows.pop(next(iter(self._rows)))
        self._contents[row] = content
        self._rows[value] = row

    def get(self, value: bytes) -> Tensor | None:
        """Return the content of this hash, valid until the next `put`; None: it is not here."""
        row = self._rows.get(value)
        return None if row is None else self._contents[row]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each place for a content is free or holds one content."""
        check_places([*self._free, *self._rows.values()], len(self._contents), "the memory tier")


def check_places(places: list[int], num_places: int, tier: str) -> None:
    """Raise RuntimeError unless `places`, the free and the used ones, are each of `num_places` places once."""
    if sorted(places) != list(range(num_places)):
        raise RuntimeError(f"the places of {tier} do not add up: {len(places)} of {num_places}")
