"""run.log in a run's folder: start and end of the run, notes, its warnings and its errors.

run.rank<N>.log has the lines of rank N, written by rank 0. run.engine.log has the lines of the engine process of
task=serve.
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
from conf.support.terminal import EscapingFormatter

FILE, ENGINE_FILE = "run.log", "run.engine.log"


class RunLog(logging.Handler):
    """Writes lines to the folder of `open_in`. Earlier lines stay in memory, so a run without a folder has no log."""

    def __init__(self, file: str = FILE) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s: %(message)s"))
        self._file = file
        self._folder: Path | None = None
        self._waiting: dict[str, list[str]] = {}
        self._turn = threading.Lock()  # lines of ranks come from another thread

    def emit(self, record: logging.LogRecord) -> None:
        self.write(self._file, self.format(record))

    @property
    def folder(self) -> Path | None:
        return self._folder

    def note(self, text: str) -> None:
        """Write a line to this log only."""
        self.emit(logging.LogRecord(__name__, logging.INFO, __file__, 0, text, None, None))

    def write(self, file: str, line: str) -> None:
        with self._turn:
            self._waiting.setdefault(file, []).append(line)
            self._write_waiting()

    def open_in(self, folder: Path) -> None:
        """Write to this folder from now on, starting with the waiting lines."""
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
    """Log the block, which is a run.

    An unexpected error is logged in `folder` if the run has not opened another folder.
    """
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
    """Set the folder of this process's run."""
    for log in _logs():
        log.open_in(folder)


def log_folder() -> Path | None:
    """Return the folder of this process's run; None if it is not set yet."""
    return next((log.folder for log in _logs()), None)


def log_engine_in(folder: Path) -> None:
    """Log this process, a server's engine, from now on."""
    log = RunLog(ENGINE_FILE)
    log.open_in(folder)
    log.note(f"process {os.getpid()} begins")
    logging.getLogger().addHandler(log)


def note(text: str) -> None:
    """Write a line to this run's log only."""
    for log in _logs():
        log.note(text)


def log_of_rank(rank: int, line: str) -> None:
    """Write a line that a rank of this run has sent."""
    for log in _logs():
        log.write(f"run.rank{rank}.log", line)


def _logs() -> list[RunLog]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, RunLog)]
