"""Signals while a command starts (`pipelines/interrupt.py` has them while a job runs), and a reader of its output that leaves."""

import os
import signal
import sys
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


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Whoever reads standard output may have seen enough before all of it is written: no error, because the files come first."""
    try:
        yield
    except BrokenPipeError:
        _discard_output()
    finally:  # what was printed may not be written yet, and Python reports a closed pipe at exit
        try:
            if sys.stdout:
                sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
