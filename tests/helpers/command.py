"""The command as a user types it, in a process of its own."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conf.compose import compose_run_config, dump, for_hydra
from conf.errors import UserError
from pipelines.tasks.launch import launch
from tests.helpers.builders import REPOSITORY, said

# Sends a signal exactly when this number of rows of a folder is finished, however busy the machine is.
INTERRUPTED = """
import os, runpy, sys
from pipelines.jobs.journal import Journal

number, folder, num_rows = int(sys.argv.pop(1)), sys.argv.pop(1), int(sys.argv.pop(1))
append = Journal.append


def hooked(self, record):
    append(self, record)
    if (str(self.folder), self.num_rows) == (folder, num_rows):
        os.kill(os.getpid(), number)


Journal.append = hooked
runpy.run_path("run.py", run_name="__main__")
"""


def run(*arguments: str, cwd: Path = REPOSITORY, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return _done([str(REPOSITORY / "run.py"), *arguments], cwd, stdin)


def run_interrupted(
    number: signal.Signals, folder: Path, num_rows: int, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run the command and send its process the signal when `num_rows` rows of the job in `folder` are finished."""
    return _done(["-c", INTERRUPTED, str(number.value), str(folder), str(num_rows), *arguments], REPOSITORY)


def _done(arguments: list[str], cwd: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True, encoding="utf-8")
    done.stderr = said(done.stderr)
    return done


def refusal(folder: Path, *arguments: str) -> str:
    """Run a command in this process that must do nothing and create no `folder`. Return its one line of output."""
    with pytest.raises(UserError) as raised:
        launch(compose_run_config(for_hydra([*arguments])), folder, dump)
    assert "\n" not in str(raised.value)
    assert not folder.exists()
    return str(raised.value)


def script(path: Path) -> None:
    """Write the console command for this repository, as pip does."""
    ((name, entry),) = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"].items()
    assert name == path.name
    module, _, function = entry.partition(":")
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(1, {str(REPOSITORY)!r})\n"
        f"from {module} import {function}\nsys.exit({function}())\n"
    )
    path.chmod(0o755)
