"""The time limit of tests/bench/gpu.py: a row that crashes, hangs or fails is reported, and the remaining rows are
measured."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipelines.loading.load_engine
from conf.schema import DeviceType
from pipelines.loading.load_engine import load_engine
from tests.bench import gpu, gpu_rows
from tests.bench.gpu_rows import CEILINGS, rows
from tests.bench.supervise import Row, supervise
from tests.helpers.cases import each

REPOSITORY = Path(__file__).resolve().parent.parent
CHILD = f"""
import os, signal, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.bench.supervise import measured

def fails():
    raise RuntimeError("two\\nlines")

ways = {{"hangs": signal.pause, "crashes": lambda: os._exit(7), "fails": fails}}
for name in sys.argv[1:]:
    print("a library's line", flush=True)
    measured(name, ways.get(name, lambda: {{"seconds": 1.0}}))
    if name == "last word":
        sys.exit(3)  # as after an error of the GPU's
"""


def run(tmp_path: Path, names: list[str], time_left: Any = lambda: 600.0) -> list[Row]:
    reported: list[Row] = []
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "child.py")]
    supervise(names, command, lambda name: 1.0 if name == "hangs" else 600.0, time_left, reported.append)
    assert [row["name"] for row in reported] == names
    return reported


def test_one_bad_row_costs_no_other(tmp_path: Path) -> None:
    names = ["good", "hangs", "better", "crashes", "fails", "last word", "best"]
    rows = {row["name"]: row.get("error", row.get("seconds")) for row in run(tmp_path, names)}
    assert [rows[name] for name in ("good", "better", "last word", "best")] == [1.0] * 4
    assert rows["hangs"] == "it took more than 1 s"
    assert rows["crashes"] == "the process ended with 7: a library's line"
    assert rows["fails"] == "RuntimeError: two lines"


def test_a_process_that_cannot_start_ends(tmp_path: Path) -> None:
    reported: list[Row] = []
    command = [sys.executable, "-c", "import sys; sys.exit('no such GPU')"]
    supervise(["a", "b"], command, lambda name: 600.0, lambda: 600.0, reported.append)
    assert [row["error"] for row in reported] == ["the process ended with 1: no such GPU"] * 2


def test_the_end_of_the_time_is_said(tmp_path: Path) -> None:
    """With a clock that stands still until the first row, and then jumps to the end."""
    reported: list[Row] = []
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "child.py")]
    supervise(["a", "hangs", "b"], command, lambda name: 600.0, lambda: 0.0 if reported else 600.0, reported.append)
    assert [row.get("error") for row in reported] == [None, "no time was left", "no time was left"]


@pytest.mark.long
def test_the_plan() -> None:
    names = list(rows())
    assert names[:4] == list(CEILINGS)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "tests/bench/gpu.py", "--plan", "--only", "int4"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    wanted = [name for name in names if name in CEILINGS or "int4" in name]
    assert done.stdout.splitlines() == ["tests/gpu", *wanted]
    done = subprocess.run([*command[:-1], "int3"], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.stderr == "--only=int3 is in no row's name: see --plan\n"


def test_every_row_has_tests_that_must_pass_first() -> None:
    """These tests are in tests/gpu, by name."""
    tests = re.findall(r"^def (test_\w+)", "".join(map(Path.read_text, REPOSITORY.glob("tests/gpu/*.py"))), re.M)
    for name in rows():
        if name not in CEILINGS:
            part = gpu.CHECKS[name.split()[0]]
            assert any(part in test for test in tests), name
            assert gpu.unchecked(name, {}) == f"no test of tests/gpu with {part!r} in its name came to an end"
            assert gpu.unchecked(name, {f"test_{part}[1]": "PASSED"}) is None
            both = {f"test_{part}[1]": "PASSED", f"test_{part}[2]": "FAILED", "test_else": "FAILED"}
            assert gpu.unchecked(name, both) == f"test_{part}[2] FAILED"


def test_rows_are_on_disk_as_soon_as_they_are_measured(tmp_path: Path) -> None:
    about = {"date": "today", "gpu": "none", "torch": "2", "triton": "3", "cuda": "13"}
    results = gpu.Results(tmp_path, about, {"test_a": "PASSED", "test_b": "FAILED"})
    name = "decode step of 8B, batch 1, bf16"
    results.add({"name": "copy", "seconds": 1e-3, "per_s": 4e12})
    results.add({"name": name, "seconds": 5e-3, "per_s": 3e12})
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"][1]["share"] == 0.75
    results.add({"name": "bf16", "error": "no time was left"})
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert "Tests: 1 passed, 1 not (test_b)." in lines[0]
    assert lines[-2:] == [
        f"| {name} | 5,000.0 | 3e+12 | 75.0% | copy | 78% |",
        "| bf16 | not measured: no time was left | | | bf16 |  |",
    ]


@each("scheme", ["none", "int4", "a8w8", "fp8"])
def test_rows_of_whole_models_run(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with a small model instead of the large one."""
    small = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "vocab_size": 2000, "max_position_embeddings": 300}
    monkeypatch.setitem(gpu_rows.CONFIGS, "8B", gpu_rows.CONFIGS["8B"] | small)
    monkeypatch.setattr(
        pipelines.loading.load_engine,
        "load_engine",
        lambda run, rows: load_engine(replace(run, device=replace(run.device, type=DeviceType.cpu)), rows),
    )
    for row in (
        gpu_rows.decode_step("8B", scheme, 2),
        gpu_rows.prompt(scheme, 100),
        gpu_rows.offline(scheme, "int8", [(5, 3), (9, 4)], 3, 60.0),
    ):
        assert row["seconds"] > 0
        assert row["per_s"] > 0
    assert row["per_s"] * row["seconds"] == pytest.approx(3 + 4 + 3)  # generated tokens of three requests
