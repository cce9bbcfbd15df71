"""Assigns rows to replicas, and reassigns the rows of a lost replica."""

from collections import Counter, deque
from collections.abc import Callable

from pipelines.jobs.prompts import PromptRow

MAX_LOSSES = 3  # a row is given up after so many replicas were lost while they held it
ALONE_AFTER = 2  # losses after which a row runs alone, so that it cannot fail other rows


class Dispatch:
    """Assigns each row to one replica at a time, until it is done or was lost with MAX_LOSSES replicas.

    Replicas are identified by numbers.
    """

    def __init__(self, next_row: Callable[[], PromptRow | None], window: int) -> None:
        """`next_row` returns None after the last row. `window`: maximum number of rows that a replica holds."""
        self._next_row = next_row
        self._window = window
        self._is_exhausted = False
        self._back: deque[PromptRow] = deque()  # rows of lost replicas, which are assigned first
        self._held: dict[int, dict[int, PromptRow]] = {}  # by replica and row index
        self._num_losses: Counter[int] = Counter()  # by row index, of unfinished rows

    @property
    def is_done(self) -> bool:
        """Whether no row is left and no replica holds one."""
        return self._is_exhausted and not self._back and not any(self._held.values())

    def holds(self, replica: int) -> int:
        return len(self._held.get(replica, ()))

    def take(self, replica: int, most: int) -> list[PromptRow]:
        held_rows, rows = self._held.setdefault(replica, {}), list[PromptRow]()
        while len(rows) < most and len(held_rows) < self._window and not any(map(self._runs_alone, held_rows)):
            if self._back and held_rows and self._runs_alone(self._back[0].index):
                break
            row = self._back.popleft() if self._back else self._next_row()
            self._is_exhausted = row is None
            if row is None:
                break
            held_rows[row.index] = row
            rows.append(row)
        return rows

    def done(self, replica: int, index: int) -> None:
        del self._held[replica][index]
        self._num_losses.pop(index, None)

    def lost(self, replica: int) -> list[PromptRow]:
        """Take back a lost replica's rows. Returns the rows that are given up after MAX_LOSSES losses."""
        rows = list(self._held.pop(replica, {}).values())
        self._num_losses.update(row.index for row in rows)
        given_up = [row for row in rows if self._num_losses[row.index] >= MAX_LOSSES]
        self._back.extendleft(row for row in reversed(rows) if self._num_losses[row.index] < MAX_LOSSES)
        for row in given_up:
            del self._num_losses[row.index]
        return given_up

    def _runs_alone(self, index: int) -> bool:
        return self._num_losses[index] >= ALONE_AFTER
