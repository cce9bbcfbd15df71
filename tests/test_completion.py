"""Tab completion in real shells, on a terminal of their own, after `.venv/bin/python run.py`."""

import os
import pty
import select
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.command import script

SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the repository as a user has it, with the environment in it."""
    for name in ("run.py", "conf"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script(tmp_path / "quintet")
    return tmp_path


class Terminal:
    """A shell that reads keys and shows their effect."""

    def __init__(self, shell: str, folder: Path) -> None:
        self._pid, self._screen = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe(shell, SHELLS[shell], os.environ | {"TERM": "dumb", "PS1": "> ", "ZDOTDIR": str(folder)})

    def types(self, keys: str, expected: str) -> None:
        """Type keys and wait until `expected` is shown. Fails if nothing new is shown within a minute."""
        os.write(self._screen, keys.encode())
        shown = ""
        while expected not in shown:
            ready, _, _ = select.select([self._screen], [], [], 60)
            assert ready, shown
            shown += os.read(self._screen, 4096).decode(errors="replace")

    def close(self) -> None:
        os.close(self._screen)  # hangs up
        os.waitpid(self._pid, 0)


@pytest.mark.long
@each("shell", SHELLS)
def test_tab_completes_options_keys_and_files(shell: str, folder: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    (folder / "prompts.txt").touch()
    terminal = Terminal(shell, folder)
    try:
        terminal.types("source conf/completion.sh; echo re''ady\n", "ready\r\n")
        terminal.types(".venv/bin/python run.py decode=gre\t", "run.py decode=greedy ")
        terminal.types("decode.tempe\t", "decode.temperature=")
        terminal.types("\x15.venv/bin/python run.py decode.speculate=\t", "run.py decode.speculate=none ")
        terminal.types("\x15.venv/bin/python run.py predict.data=prom\t", "predict.data=prompts.txt")
        terminal.types("\x15./quintet decode=gre\t", "quintet decode=greedy ")
        terminal.types("decode.tempe\t", "decode.temperature=")
        terminal.types("\x15./quintet predict.data=prom\t", "predict.data=prompts.txt")
        terminal.types("\x15.venv/bin/python prom\t", "python prompts.txt")  # another script's arguments are files
    finally:
        terminal.close()
