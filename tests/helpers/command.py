"""The command as its user types it, in a process of its own."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.builders import REPOSITORY, said


def run(*arguments: str, cwd: Path = REPOSITORY, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "run.py"), *arguments]
    done = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True, encoding="utf-8")
    done.stderr = said(done.stderr)
    return done
