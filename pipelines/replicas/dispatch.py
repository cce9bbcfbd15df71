"""Which rows each of several replicas has, and where those of a lost one go."""

from collections import Counter, deque
from collections.abc import Callable

from pipelines.prompts import PromptRow

MAX_LOSSES = 3  # of replicas that had a row: then it is not run again
ALONE_AFTER = 2  # losses: then a row runs without company, so that its own fault is not another row's


class Dispatch:
    """Gives each row to one replica at a time, until it is done or has lost too many of them. Replicas have numbers."""

    def __init__(self, next_row: Callable[[], PromptRow | None], window: int) -> None:
        """`next_row` returns None where there is none. `window`: rows that a replica has at most."""
        self._next_row = next_row
        self._window = window
        self._is_exhausted = False
        self._back: deque[PromptRow] = deque()  # rows of lost replicas, which go first
        self._held: dict[int, dict[int, PromptRow]] = {}  # by replica and index
        self._num_losses: Counter[int] = Counter()  # by index, of rows that are not done

    @property
    def is_done(self) -> bool:
        """Whether there is no row, and none is held."""
        return self._is_exhausted and not self._back and not any(self._held.values())

    def holds(self, replica: int) -> int:
        """Return how many rows a replica has."""
        return len(self._held.get(replica, ()))

    def take(self, replica: int, most: int) -> list[PromptRow]:
        """Return the next rows for a replica, at most `most`."""
        held, rows = self._held.setdefault(replica, {}), list[PromptRow]()
        while len(rows) < most and len(held) < self._window and not any(map(self._runs_alone, held)):
            if self._back and held and self._runs_alone(self._back[0].index):
                break
            row = self._back.popleft() if self._back else self._next_row()
            self._is_exhausted = row is None
            if row is None:
                break
            held[row.index] = row
            rows.append(row)
        return rows

    def done(self, replica: int, index: int) -> None:
        """Note that a replica has done one of its rows."""
        del self._held[replica][index]
        self._num_losses.pop(index, None)

    def lost(self, replica: int) -> list[PromptRow]:
        """Take a lost replica's rows back. Returns those that have lost too many."""
        rows = list(self._held.pop(replica, {}).values())
        self._num_losses.update(row.index for row in rows)
        given_up = [row for row in rows if self._num_losses[row.index] >= MAX_LOSSES]
        self._back.extendleft(row for row in reversed(rows) if self._num_losses[row.index] < MAX_LOSSES)
        for row in given_up:
            del self._num_losses[row.index]
        return given_up

    def _runs_alone(self, index: int) -> bool:
        return self._num_losses[index] >= ALONE_AFTER
