"""Signals while a command starts; `pipelines/interrupt.py` has them while a job runs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_waiting() -> Iterator[None]:
    """While torch is imported: an exception in the midst of its C++ aborts the process, or is lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
