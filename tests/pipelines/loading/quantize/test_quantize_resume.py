"""A quantisation that ended in any way continues, and writes the files of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import dump
from conf.errors import UserError
from conf.quantization import QuantConfig, SparsityConfig, SparsityMethod
from conf.schema import RunConfig
from pipelines.tasks.quantize import run_quantize
from quantization.quantizer import Quantizer
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS
from tests.helpers.quantized_models import CALIBRATED, INT8, make, quantize_run, random_rows, write_rows

LLAMA = GOLDENS / "llama3"

# Kills a run at a given call with an uncatchable signal. Every run is a fork of a process that has only imported
# modules.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
from conf.compose import dump
from pipelines.loading.quantize import preflight as quantize_preflight
from pipelines.tasks.quantize import run_quantize
from quantization.quantizer import Quantizer
from tests.helpers.kill import before
from tests.helpers.quantized_models import CALIBRATED, make, quantize_run

model, data, base, scheme, moments = json.loads(sys.argv[1])


quantize_preflight.expected_seconds = lambda *arguments: 0.0  # it quantises, too, and would be counted


def job(name):
    return quantize_run(Path(model), CALIBRATED[scheme], Path(base) / name, Path(data))


def run(name, hook=None):
    child = os.fork()
    if child == 0:
        if hook:
            before({"quantize": Quantizer, "replace": os, "rename": os, "unlink": Path}[hook[0]], *hook)
        run_quantize(job(name), Path(base) / f"run-{name}", dump)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


sys.stdout, out = open(os.devnull, "w"), sys.stdout
make(job("whole"), Path(base) / "run-whole-0")  # for all that this imports
ends = [run("first")]
for i, moment in enumerate(moments):
    ends += [run(str(i), moment), os.path.exists(f"{base}/{i}"), run(str(i))]
print(json.dumps(ends), file=out, flush=True)
"""
# Rename calls are for the other files, and for each part when it is complete, after folds into it; an unlink marks an
# unfinished job.
MOMENTS = [
    ("replace", 1),
    ("quantize", 2),
    ("replace", 3),
    ("unlink", 1),
    ("rename", 1),
]


@pytest.fixture(autouse=True)
def _no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate also quantises parts, which would be counted."""
    monkeypatch.setattr("pipelines.loading.quantize.preflight.expected_seconds", lambda *arguments: 0.0)


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))


@pytest.mark.long
@each(
    ("scheme", "moments"),
    [
        ("a8w8 static smoothquant", MOMENTS),  # which folds something into the previous part
        ("int4 gptq, groups on the way", [("replace", 3)]),
        ("int8 gptq, static cache", [("quantize", 2)]),
    ],
)
def test_killed_at_any_moment_it_leaves_the_files_of_an_uninterrupted_run(
    scheme: str, moments: list[tuple[str, int]], data: Path, tmp_path: Path
) -> None:
    base = tmp_path / scheme
    base.mkdir()
    arguments = json.dumps([str(LLAMA), str(data), str(base), scheme, moments])
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, arguments], env=environment, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert json.loads(done.stdout) == [0] + [-signal.SIGKILL, False, 0] * len(moments)
    expected = files_in(base / "first")
    assert {"config.json", "manifest.json", "report.md", "errors.png"} < expected.keys()
    for i, moment in enumerate(moments):
        assert files_in(base / str(i)) == expected, moment
    assert not [file for file in base.iterdir() if file.name.startswith(".")]


@pytest.fixture
def quantized_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the parts that were quantised, in their order."""
    seen: list[int] = []
    quantize = Quantizer.quantize

    def spy(self: Quantizer, part: Any, *arguments: Any) -> Any:
        seen.append(part.index)
        return quantize(self, part, *arguments)

    monkeypatch.setattr(Quantizer, "quantize", spy)
    return seen


def ended_by(error: BaseException, run: RunConfig, tmp_path: Path) -> None:
    """End the run before its second part."""
    with pytest.MonkeyPatch.context() as patch:
        quantize = Quantizer.quantize

        def hooked(self: Quantizer, part: Any, *observed: Any) -> Any:
            if part.index == 1:
                raise error
            return quantize(self, part, *observed)

        patch.setattr(Quantizer, "quantize", hooked)
        with pytest.raises(type(error)):
            make(run, tmp_path / "run")


@pytest.mark.parametrize(
    ("error", "quant"),
    [
        (OSError(28, "No space left on device"), CALIBRATED["a8w8 static smoothquant"]),
        (
            KeyboardInterrupt(),
            QuantConfig(INT8, overrides={"*.down_proj": "none"}, sparsity=SparsityConfig(SparsityMethod.wanda)),
        ),
    ],
)
def test_an_ended_run_is_continued(
    error: BaseException, quant: QuantConfig, data: Path, tmp_path: Path, quantized_parts: list[int]
) -> None:
    run = quantize_run(LLAMA, quant, tmp_path / "made", data)
    ended_by(error, run, tmp_path)
    assert not (tmp_path / "made").exists()
    assert quantized_parts == [0]
    make(run, tmp_path / "run")
    assert quantized_parts == [0, 1, 2]
    make(quantize_run(LLAMA, quant, tmp_path / "whole", data), tmp_path / "run")
    assert files_in(tmp_path / "made") == files_in(tmp_path / "whole")


@pytest.mark.long
def test_another_job_uses_nothing_of_it(data: Path, tmp_path: Path, quantized_parts: list[int]) -> None:
    run = quantize_run(LLAMA, CALIBRATED["a8w8 static"], tmp_path / "made", data)
    run = replace(run, quantize=replace(run.quantize, overwrite=True))
    changes = [
        replace(run, calibrate=replace(run.calibrate, seed=1)),
        replace(run, quant=CALIBRATED["a8w8 static smoothquant"]),
        quantize_run(LLAMA, run.quant, tmp_path / "made", write_rows(tmp_path / "other.jsonl", random_rows(19, 16))),
    ]
    for changed in changes:
        quantized_parts.clear()
        ended_by(KeyboardInterrupt(), run, tmp_path)
        make(replace(changed, quantize=run.quantize), tmp_path / "run")
        assert quantized_parts == [0, 0, 1, 2]


def test_a_damaged_part_is_one_error(data: Path, tmp_path: Path) -> None:
    run = quantize_run(LLAMA, CALIBRATED["a8w8 static"], tmp_path / "made", data)
    ended_by(KeyboardInterrupt(), run, tmp_path)
    part = tmp_path / ".made.partial" / "model-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(
        UserError, match=r"model-00000.safetensors is damaged .*: remove .*\.made\.partial to begin again"
    ):
        make(run, tmp_path / "run")


def test_two_runs_with_one_target_do_not_mix(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = quantize_run(LLAMA, CALIBRATED["a8w8 static"], tmp_path / "made", data)
    quantize = Quantizer.quantize

    def meanwhile(self: Quantizer, *arguments: Any) -> Any:
        monkeypatch.undo()
        with pytest.raises(UserError, match=r"another run writes quantize.output=.*made: wait for it, or give another"):
            run_quantize(run, tmp_path / "second", dump)
        return quantize(self, *arguments)

    monkeypatch.setattr(Quantizer, "quantize", meanwhile)
    make(run, tmp_path / "run")
    assert (tmp_path / "made" / "manifest.json").is_file()
    assert not (tmp_path / "second").exists()
