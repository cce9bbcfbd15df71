"""run.log of a run's folder: when the run began and how it ended, its warnings and its errors.

run.rank<N>.log has those of rank N, which rank 0 writes. run.engine.log has those of the process in which task=serve computes.
"""

import logging
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from conf.errors import UserError
from conf.terminal import EscapingFormatter

FILE, ENGINE_FILE = "run.log", "run.engine.log"


class RunLog(logging.Handler):
    """Writes lines to the folder that `open_in` names. Lines that come earlier wait for it: a run that makes no folder leaves no log."""

    def __init__(self, file: str = FILE) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s: %(message)s"))
        self._file = file
        self._folder: Path | None = None
        self._waiting: dict[str, list[str]] = {}
        self._turn = threading.Lock()  # a rank's lines come in another thread

    def emit(self, record: logging.LogRecord) -> None:
        self.write(self._file, self.format(record))

    @property
    def folder(self) -> Path | None:
        return self._folder

    def note(self, text: str) -> None:
        """Write a line that is not logged elsewhere."""
        self.emit(logging.LogRecord(__name__, logging.INFO, __file__, 0, text, None, None))

    def write(self, file: str, line: str) -> None:
        """Write a line to a file of the folder."""
        with self._turn:
            self._waiting.setdefault(file, []).append(line)
            self._write_waiting()

    def open_in(self, folder: Path) -> None:
        """Write to this folder from now on, and what waits first."""
        with self._turn:
            self._folder = folder
            self._write_waiting()

    def _write_waiting(self) -> None:
        if self._folder is None:
            return
        for file, lines in self._waiting.items():
            with (
                suppress(OSError),
                open(self._folder / file, "a", encoding="utf-8", errors="backslashreplace") as stream,
            ):
                stream.writelines(f"{line}\n" for line in lines)
        self._waiting.clear()


@contextmanager
def run_log(task: str, folder: Path) -> Iterator[None]:
    """Log the block, which is a run. An error that is no user's is logged in `folder` where the run has made no other."""
    log, start = RunLog(), time.monotonic()
    logging.getLogger().addHandler(log)
    log.note(f"process {os.getpid()} begins task={task} in {folder}: {shlex.join(sys.argv)}")
    try:
        yield
        log.note(f"finished after {time.monotonic() - start:.1f} s")
    except BaseException as error:
        after = f"ended after {time.monotonic() - start:.1f} s by"
        if isinstance(error, UserError | KeyboardInterrupt | SystemExit):
            log.note(f"{after} {type(error).__name__}: {error}")
        else:
            log.note(f"{after}\n{''.join(traceback.format_exception(error))}")
            if log.folder is None:
                folder.mkdir(parents=True, exist_ok=True)
                log.open_in(folder)
        raise
    finally:
        logging.getLogger().removeHandler(log)


def log_in(folder: Path) -> None:
    """Name the folder of the run that this process is in."""
    for log in _logs():
        log.open_in(folder)


def log_folder() -> Path | None:
    """Return the folder of the run that this process is in; None before it has one."""
    return next((log.folder for log in _logs()), None)


def log_engine_in(folder: Path) -> None:
    """Log this process, which is a server's engine, from now on."""
    log = RunLog(ENGINE_FILE)
    log.open_in(folder)
    log.note(f"process {os.getpid()} begins")
    logging.getLogger().addHandler(log)


def log_of_rank(rank: int, line: str) -> None:
    """Write a line that a rank of this run has sent."""
    for log in _logs():
        log.write(f"run.rank{rank}.log", line)


def _logs() -> list[RunLog]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, RunLog)]
