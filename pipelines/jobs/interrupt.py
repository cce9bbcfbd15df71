"""Handle SIGINT and SIGTERM while a job runs. The first signal ends the job between two steps."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """Raised after a signal. If it is not caught, it ends the process with the exit code that shells expect."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class RankLost(BaseException):
    """Raised if another rank has ended or does not respond. A BaseException, because it is not an error of a row."""


class Interruption:
    """Stores the first signal until `check` is called. The second signal ends the job immediately."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._waiting = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self._waiting or self._number is not None:
            raise Interrupted(number)
        self._number = number

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self._number is not None:
            raise Interrupted(self._number)

    def checked(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, with a check before each.

        A signal also ends the wait for an item, which has no time limit.
        """
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
    """Handle both signals within the block.

    Python allows this only in the main thread; in other threads nothing is handled.
    """
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
