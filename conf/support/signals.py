"""Signals during the start of a command, and readers that close the output early.

`pipelines/jobs/interrupt.py` handles signals of a running job.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_waiting() -> Iterator[None]:
    """Block SIGINT and SIGTERM while torch is imported or safetensors reads.

    An exception within their native code aborts the process, is lost, or becomes another exception.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let a reader of standard output, such as `head`, close it early without an error: the results are in files."""
    try:
        yield
    except BrokenPipeError:
        _discard_output()
    # Buffered output may not be written yet, and Python reports a closed pipe at exit.
    finally:
        try:
            if sys.stdout:
                sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
