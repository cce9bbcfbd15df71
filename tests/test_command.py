"""The console command: run.py in any folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.builders import REPOSITORY, said
from tests.helpers.command import run, script


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([folder / "quintet", *arguments], cwd=folder, capture_output=True, text=True)
    done.stderr = said(done.stderr)
    return done


@pytest.mark.long
def test_it_does_what_run_py_does(tmp_path: Path) -> None:
    script(tmp_path / "quintet")
    (tmp_path / "prompts.txt").write_text("Once\n")
    settings = ["predict.data=prompts.txt", "decode.max_new_tokens=3"]
    for name, start in (
        ("a", lambda *arguments: run(*arguments, cwd=tmp_path)),
        ("b", lambda *a: command(tmp_path, *a)),
    ):
        done = start(*settings, f"hydra.run.dir={name}")
        assert (done.returncode, done.stderr) == (0, "")
    files = [tmp_path / name / "predictions.jsonl" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_its_errors_match_run_py(tmp_path: Path) -> None:
    script(tmp_path / "quintet")
    for arguments in (["decode=gredy"], ["--version"]):
        one, other = run(*arguments, cwd=tmp_path), command(tmp_path, *arguments)
        assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
    assert not (tmp_path / "outputs").exists()


def test_without_its_folder_it_is_one_line(tmp_path: Path) -> None:
    """A package that was installed without its source folder has no run.py."""
    (tmp_path / "conf").mkdir()
    shutil.copy(REPOSITORY / "conf" / "command.py", tmp_path / "conf")
    code = "from conf.command import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert said(done.stderr) == (
        "error: quintet runs from its own folder: install it there with pip install --editable .\n"
    )
