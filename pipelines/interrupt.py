"""SIGINT and SIGTERM while a job runs: a wish to end that is granted between two steps."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """Uncaught it ends the process as a shell expects of one that was interrupted."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Interruption:
    """Keeps the first signal until somebody asks for it; the second ends the job wherever it is."""

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
        """The items, with a check before each. While one is waited for, which may take for ever, a signal ends the waiting."""
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
    """Takes the two signals for as long as it is open; elsewhere than in the main thread Python lets nobody take them."""
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
