"""Runs of task=predict on ranks that are processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.builders import REPOSITORY
from tests.helpers.processes import processes
from tests.helpers.waiting import LIMIT_S, until

HEARTBEAT_S = 5
END_S = 20.0  # time limit for the end of a run after a loss is detected, which takes a second on an idle machine
RESULTS = ("predictions.jsonl", "text_generation_result.txt")
COMMAND = ("run.py", "decode=sampling", "decode.seed=3", "decode.max_new_tokens=40", "predict.batch_size=2")


def write_prompts(file: Path) -> Path:
    file.write_text("".join(f"Once upon a time there were {i} cats. " * 8 + "\n" for i in range(24)))
    return file


def start(
    data: Path, folder: Path, *arguments: str, launcher: tuple[str, ...] = (sys.executable,), **environment: str
) -> "subprocess.Popen[str]":
    """Start a run in its own session.

    Tests stop its ranks with SIGSTOP. Linux sends SIGHUP to an orphaned process group that has a stopped process
    (setpgid(2)), so such a process must not be in the group of the tests.
    """
    command = [*launcher, *COMMAND, f"predict.data={data}", f"hydra.run.dir={folder}", *arguments]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **environment}, **settings)  # type: ignore[call-overload, no-any-return]


def done(process: "subprocess.Popen[str]") -> str:
    """Wait for a run that succeeds, and return its standard error."""
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return str(errors)


def workers_of(process: "subprocess.Popen[str]", count: int) -> list[int]:
    """Wait for the processes of ranks 1 to `count` of a run, and return them."""
    started: list[int] = []

    def there() -> bool:
        known = processes().items()
        pids = [pid for pid, (parent, command) in known if parent == process.pid and "loading.worker" in command]
        started[:] = sorted(pids)  # in the order of their start
        return len(started) == count

    until(there)
    return started


def lose(process: "subprocess.Popen[str]", workers: list[int], rank: int, number: signal.Signals) -> str:
    """Kill or stop a rank, and return the run's one line of error. The run must end in time and leave no process."""
    os.kill(workers[rank - 1], number)
    began = time.monotonic()
    _, errors = process.communicate(timeout=LIMIT_S)
    took = time.monotonic() - began
    assert process.returncode == 1
    (line,) = errors.splitlines()
    killed = number == signal.SIGKILL
    end = "was ended by signal 9 (SIGKILL, out of memory?)" if killed else f"has been silent for {HEARTBEAT_S} s"
    assert line.startswith(f"error: rank {rank} (process {workers[rank - 1]}) {end}")
    assert took < END_S + (0 if killed else HEARTBEAT_S)
    assert not processes().keys() & {*workers}
    return str(line)


def are_gone(pids: list[int]) -> bool:
    """Return whether none of these processes is a rank any more. A process without a parent may remain as a zombie."""
    known = processes()
    return not any("loading.worker" in known.get(pid, (0, ""))[1] for pid in pids)


def wait_for_rows(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Wait until the run has finished some rows, but not all."""
    journal = folder / "journal.jsonl"
    until(lambda: process.poll() is not None or (journal.exists() and journal.read_bytes().count(b"\n") > 2))
    assert process.poll() is None


def same_files(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in RESULTS)
