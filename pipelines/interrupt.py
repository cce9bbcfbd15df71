"""Handle SIGINT and SIGTERM while a job runs: the first one ends it between two steps."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """Raised for a signal. Uncaught, it ends the process with the exit code that shells expect after an interrupt."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class RankLost(BaseException):
    """Raised where another rank has ended or is silent. No Exception: it is no fault of a row."""


class Interruption:
    """Keeps the first signal until `check` is called. The second signal ends the job wherever it is."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._waiting = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self._waiting or self._number is not None:
            raise Interrupted(number)
        self._number = number

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self._number is not None:
            raise Interrupted(self._number)

    def checked(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, with a check before each. A signal also ends the wait for an item, which may take for ever."""
        source = iter(items)
        while True:
            self._waiting = True
            self.check()
            try:
                item = next(source)
            except StopIteration:
                return
            finally:
                self._waiting = False
            yield item


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Handle the two signals within the block. Python allows this in the main thread alone; in others nothing is handled."""
    state = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    before = {number: signal.signal(number, state.receive) for number in SIGNALS}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
