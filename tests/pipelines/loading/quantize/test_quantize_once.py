"""A model that a run calibrates by itself: made only once for any number of processes, with an estimate at the
start."""

import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import compose_run_config
from conf.errors import UserError
from conf.quantization import Activations, CalibrateConfig, QuantConfig, QuantMethod, QuantScheme
from conf.schema import Task
from models.decoder import DecoderLayer
from models.formats.manifest import MANIFEST
from pipelines.jobs import report
from pipelines.jobs.output_folder import only_maker
from pipelines.loading.model_source import resolve_model
from pipelines.loading.quantize import estimate as quantize_estimate
from pipelines.loading.quantize import model as making
from pipelines.loading.quantize.calibrated import calibration_job, find_or_make
from pipelines.loading.quantize.preflight import preflight
from pipelines.loading.request_settings import read_request_settings
from pipelines.tasks.quantize import run_quantize
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS
from tests.helpers.quantized_models import CALIBRATED, quantize_run, random_rows, write_rows

LLAMA = GOLDENS / "llama3"
NUM_TOKENS = 6 * 16  # of quantize_run's samples, which are all in one step

# Three processes want one model. The first to get the lock is killed after both other processes have reported that they
# wait.
DRIVER = """
import json, logging, os, signal, sys
from pathlib import Path
from pipelines.jobs.report import NO_PROGRESS
from pipelines.loading.model_source import resolve_model
from pipelines.loading.quantize import model as making
from pipelines.loading.quantize.calibrated import calibration_job, find_or_make
from pipelines.tasks.quantize import run_quantize
from tests.helpers.quantized_models import CALIBRATED, quantize_run

model, data, made = map(Path, json.loads(sys.argv[1]))
os.environ["QUINTET_OUTPUTS"] = str(made.parent)
waiting, ended = os.pipe(), os.pipe()
make_model = making.make_model
dead = made.parent / "dead"


class Waiting(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith(f"another run is making {made}/llama3-a8w8-"):
            os.write(waiting[1], b"w")


def die_first(*arguments, **options):
    try:
        dead.touch(exist_ok=False)
    except FileExistsError:
        os.write(ended[1], b"made ")
        return make_model(*arguments, **options)
    for _ in range(2):
        os.read(waiting[0], 1)
    os.kill(os.getpid(), signal.SIGKILL)


children = []
for i in range(3):
    children.append(os.fork())
    if children[-1] == 0:
        logging.getLogger().addHandler(Waiting())
        making.make_model = die_first
        run = quantize_run(model, CALIBRATED["a8w8 dynamic smoothquant"], None, data)
        folder = find_or_make(calibration_job(run), resolve_model(run.model), NO_PROGRESS)
        os.write(ended[1], b"found " if (folder / "config.json").is_file() else b"nothing ")
        os._exit(0)
codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
os.close(ended[1])
print(json.dumps([codes, sorted(os.read(ended[0], 1000).decode().split())]))
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))


@pytest.mark.long
def test_several_processes_make_a_model_once_also_when_the_first_is_killed(data: Path, tmp_path: Path) -> None:
    made = tmp_path / "quantized"
    arguments, environment = (
        json.dumps([str(LLAMA), str(data), str(made)]),
        os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    command = [sys.executable, "-c", DRIVER, arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout) == [[-signal.SIGKILL, 0, 0], ["found", "found", "made"]], done.stderr
    (folder,) = made.iterdir()  # no lock and no partial files
    assert (folder / MANIFEST).is_file()


def test_the_calibrated_model_is_announced_before_it_is_made(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        run = quantize_run(LLAMA, CALIBRATED["a8w8 static"], None, data)
        folder = find_or_make(calibration_job(run), resolve_model(run.model), report.NO_PROGRESS)
    beginning = f"calibrating {LLAMA} by quant=a8w8 on 6 samples of at most 16 tokens: about "
    assert re.search(rf"^{re.escape(beginning)}[\d,]+ s; it is kept in {re.escape(str(folder))}$", caplog.messages[0])
    assert not (folder / "report.md").exists()  # only task=quantize makes it


def test_a_task_that_makes_the_same_model_waits(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It then finds the model, and no message mentions another run that writes."""
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    run = replace(quantize_run(LLAMA, CALIBRATED["a8w8 dynamic smoothquant"], None, data), task=Task.quantize)
    make_model, waiting, refused = making.make_model, threading.Event(), []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("another run is making"):
                waiting.set()

    def make_by_task() -> None:
        with pytest.raises(UserError) as raised:
            run_quantize(run, tmp_path / "run", lambda *_: "")
        refused.append(str(raised.value))

    task, handler = threading.Thread(target=make_by_task), Noted()

    def beside_a_task(*arguments: Any, **options: Any) -> Any:
        task.start()
        assert waiting.wait(60)
        return make_model(*arguments, **options)

    monkeypatch.setattr(making, "make_model", beside_a_task)
    logging.getLogger().addHandler(handler)
    try:
        folder = find_or_make(calibration_job(run), resolve_model(run.model), report.NO_PROGRESS)
        task.join(60)
    finally:
        logging.getLogger().removeHandler(handler)
    remedy = "give another folder, or quantize.overwrite=true to replace it"
    assert refused == [f"quantize.output={folder} exists: {remedy}"]


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".model.lock").mkdir()
    message = (
        "model.lock cannot be opened .Is a directory.: remove it, or name another folder: task=quantize quantize.out"
    )
    with pytest.raises(UserError, match=message), only_maker(tmp_path / "model"):
        pass


class Lines(io.StringIO):
    """A stream whose reader waits for a line."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Condition()

    def flush(self) -> None:
        with self.written:
            self.written.notify_all()

    def comes(self, line: str, times: int = 1) -> bool:
        """Return whether a line that matches the pattern comes this number of times within a minute."""
        with self.written:
            return self.written.wait_for(lambda: len(re.findall(line, self.getvalue(), re.MULTILINE)) >= times, 60)


def test_without_a_terminal_lines_tell_how_far_a_calibration_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr(sys, "stderr", lines)
    monkeypatch.setattr(report, "LINE_EVERY_S", 0.001)
    with report.progress_bar() as progress:
        with progress.calibrating():
            progress.loaded(5_000_000, 20_000_000)
            assert lines.comes(r"^calibrating: 5 of 20 MB loaded, \d+ s$")
            progress.quantized(3, 32)
            assert lines.comes(r"^calibrating: 3 of 32 layers done, \d+ s$", times=2)  # also while nothing is done
            progress.quantized(4, 32)
            assert lines.comes(r"^calibrating: 4 of 32 layers done, about \d+ s for the rest, \d+ s$")
        told = lines.getvalue()
        progress.quantized(5, 32)
    assert lines.getvalue() == told
    assert not [thread for thread in threading.enumerate() if thread.name == "calibrating"]


@pytest.mark.long
def test_a8w8_alone_finds_smoothing_from_few_tokens() -> None:
    run = compose_run_config(["quant=a8w8"])
    assert (run.quant.activations, run.quant.method) == (Activations.dynamic, QuantMethod.smoothquant)
    few = run.calibrate.resolved(run.quant)
    assert (few.num_samples, few.sequence_length) == (4, 64)
    static = compose_run_config(["quant=a8w8", "quant.activations=static"])
    many = static.calibrate.resolved(static.quant)
    assert (many.num_samples, many.sequence_length) == (128, 512)
    for other in ("quant.smooth.piecewise=true", "quant.shift=true"):  # output errors, least and greatest values
        searched = compose_run_config(["quant=a8w8", other])
        assert searched.calibrate.resolved(searched.quant) == many
    assert CalibrateConfig(num_samples=7).resolved(run.quant) == CalibrateConfig(num_samples=7, sequence_length=64)
    assert not compose_run_config(["quant=a8w8", "quant.method=rtn"]).quant.needs_calibration


@each(
    ("scheme", "passes"),
    [
        ("a8w8 dynamic smoothquant", 1),
        ("a8w8 static", 1),
        ("fp8 dynamic smoothquant, static cache", 2),
        ("int8 gptq", 1),
        ("int4 awq, auto_clip", 2),
    ],
)
def test_the_estimate_counts_the_tokens_that_a_layer_sees(
    scheme: str, passes: int, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a pass of a token takes a second and all else no time, a run takes one second per token, layer and pass. The
    head has no layer."""
    run, clock = quantize_run(LLAMA, CALIBRATED[scheme], None, data), Clock()
    monkeypatch.setattr(quantize_estimate, "START_S", 0.0)
    monkeypatch.setattr(quantize_estimate, "REPORT_S", 0.0)
    monkeypatch.setattr("pipelines.loading.quantize.estimate.time.perf_counter", clock)
    monkeypatch.setattr("quantization.calibration.perf_counter", clock)
    forward = DecoderLayer.forward

    def counted(self: DecoderLayer, stream: tuple[torch.Tensor, ...], *others: object) -> object:
        clock.seconds += len(stream[0]) if len(stream[0]) == NUM_TOKENS else 0  # else a probe
        return forward(self, stream, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(DecoderLayer, "forward", counted)
    source = resolve_model(run.model)
    ready = preflight(calibration_job(run), source, read_request_settings(run.model, source), data.parent, True)
    measured = passes * NUM_TOKENS  # one of the layers, which are all alike
    layers = source.shape.num_hidden_layers
    assert ready.duration == f"about {measured + passes * NUM_TOKENS * layers:,.0f} s"
    assert [file.name for file in data.parent.iterdir()] == [data.name]  # the probe is deleted


def test_layers_of_other_shapes_are_measured_apart(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has an MLP, the other layers experts. Their different weights are only read for timing."""
    shutil.copytree(GOLDENS / "qwen2_moe", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0]}))
    run = quantize_run(tmp_path / "model", QuantConfig(QuantScheme.int8, QuantMethod.gptq), None, data)
    costs, measure = [], quantize_estimate._measure

    def noted(*arguments: Any) -> Any:
        costs.extend(measure(*arguments))
        return costs

    monkeypatch.setattr(quantize_estimate, "_measure", noted)
    source = resolve_model(run.model)
    preflight(calibration_job(run), source, read_request_settings(run.model, source), data.parent, True)
    assert len(costs) == 3  # two kinds of layers, and the head


class Clock:
    """A clock that only counted operations advance."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds
