"""The command task=serve in a process of its own."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.helpers.builders import REPOSITORY
from tests.helpers.waiting import LIMIT_S


def start_server(folder: Path, *arguments: str, stderr: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start a server on a free port. Its run is in `folder`."""
    command = [sys.executable, "run.py", "task=serve", "serve.port=0", "device=cpu", f"hydra.run.dir={folder}"]
    return subprocess.Popen([*command, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=stderr, text=True)


def ready_url(process: subprocess.Popen[str]) -> str | None:
    """Return the URL in a server's first line, without /v1; None if it ends before it is ready."""
    line = process.stdout.readline() if process.stdout else ""
    return line.removeprefix("ready: ").strip().removesuffix("/v1") if line.startswith("ready: ") else None


@contextmanager
def served(folder: Path, *arguments: str, waits: bool = True) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Return the server's process and its URL; the URL is "" without `waits`."""
    process = start_server(folder, *arguments)
    try:
        url = ready_url(process) if waits else ""
        if url is None:  # no assertion: PYTHONOPTIMIZE removes the assertions of helpers
            raise RuntimeError(process.stderr.read() if process.stderr else "the server ended")
        yield process, url
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    """Return the exit code and the errors after a signal."""
    process.send_signal(number)
    _, stderr = process.communicate(timeout=LIMIT_S)
    return process.returncode, stderr
