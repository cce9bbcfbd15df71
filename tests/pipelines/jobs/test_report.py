"""Files are written whole or not at all; a progress bar appears on terminals only."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipelines.jobs import report
from pipelines.jobs.report import environment, peak_memory_bytes, reset_peak_memory, write_atomically
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each

DRAW = """
from pipelines.jobs.report import progress_bar
with progress_bar() as bar:
    bar.loaded(5_000_000, 10_000_000)
    bar.loaded(10_000_000, 10_000_000)
    bar.generated(1, 4, 123.4)
    bar.generated(4, 4, 99.0)
"""


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    write_atomically(file, ["one\n", "今天\n"])
    write_atomically(file, ["two"])
    assert file.read_text(encoding="utf-8") == "two"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, ["new ", "\ud800"])
    assert file.read_text() == "two"
    assert list(tmp_path.iterdir()) == [file]
    write_atomically(tmp_path / "file.png", b"\x89PNG\r\n")
    assert (tmp_path / "file.png").read_bytes() == b"\x89PNG\r\n"


def draw(stderr: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-c", DRAW], stderr=stderr, stdout=subprocess.PIPE, env=environment)


def test_progress_is_drawn_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    process = draw(theirs)
    os.close(theirs)
    drawn = b""
    try:
        # while it draws: a terminal buffers a few frames, and then blocks the writer
        while chunk := os.read(ours, 65536):
            drawn += chunk
    except OSError:  # the other side is closed and everything is read
        pass
    process.communicate()
    os.close(ours)
    assert process.returncode == 0
    assert b"load" in drawn
    assert b"4 of 4 rows, 99 tokens/s" in drawn


def test_nothing_is_drawn_elsewhere() -> None:
    process = draw(subprocess.PIPE)
    assert (*process.communicate(), process.returncode) == (b"", b"", 0)


def test_environment_names_versions_and_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = environment()
    assert values["packages"]["torch"] is not None
    assert values["cpu_count"] == os.cpu_count()
    assert peak_memory_bytes(torch.device("cpu")) > 50_000_000
    monkeypatch.setattr(report, "CLEAR_REFS", tmp_path / "none")
    monkeypatch.setattr(report, "STATUS", tmp_path / "none")
    reset_peak_memory()
    assert peak_memory_bytes(torch.device("cpu")) > 50_000_000  # without /proc, of the whole process


@pytest.mark.long
@pytest.mark.skipif(not report.CLEAR_REFS.exists(), reason="only Linux lets the peak of a process begin again")
@each("tensor_bytes", [2**18, 2**27])
def test_the_peak_is_since_the_last_reset(tensor_bytes: int) -> None:
    survivors = []  # between the tensors, so that the heap does not shrink by itself

    def peak_of(num_bytes: int) -> int:
        reset_peak_memory()
        held = []
        for _ in range(0, num_bytes, tensor_bytes):
            held.append(torch.ones(tensor_bytes // 4))
            survivors.append(torch.ones(2**12))
        return peak_memory_bytes(torch.device("cpu"))

    nothing, much, again = peak_of(0), peak_of(2**27), peak_of(0)
    assert much > nothing + 2**27 * 0.9
    assert again < nothing + 2**27 * 0.2  # allowance for the surviving tensors and the allocators
