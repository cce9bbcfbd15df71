"""Signals while a command starts (`pipelines/interrupt.py` has those of a running job), and readers that close the output early."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_waiting() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM while torch is imported: an exception within its C++ aborts the process or is lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let a reader of standard output, such as `head`, close it early without an error: what counts is in the files."""
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
