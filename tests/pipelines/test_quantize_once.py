"""A model that a run calibrates by itself: made once by however many processes, and told from the beginning."""

import io
import json
import logging
import os
import re
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
from conf.schema import RunConfig, Task
from models.decoder import DecoderLayer
from models.formats.manifest import MANIFEST
from models.linear_layers import linear_specs
from pipelines import quantize, quantize_estimate, quantize_job, report
from pipelines.opening import open_source
from pipelines.output_folder import only_maker
from pipelines.quantize import find_or_make
from pipelines.quantize_estimate import Costs
from pipelines.quantize_preflight import preflight
from tests.helpers.builders import REPOSITORY
from tests.helpers.goldens import GOLDENS
from tests.helpers.quantized_models import CALIBRATED, quantize_run, random_rows, write_rows

LLAMA = GOLDENS / "llama3"

# Three processes want one model. The first to get the lock waits until both others have said that they wait, and is then killed.
DRIVER = """
import json, logging, os, signal, sys
from pathlib import Path
from pipelines import quantize, quantize_job
from pipelines.opening import open_source
from tests.helpers.quantized_models import CALIBRATED, quantize_run

model, data, made = map(Path, json.loads(sys.argv[1]))
quantize_job.MADE = made
waiting, ended = os.pipe(), os.pipe()
make_model = quantize.make_model
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
        quantize.make_model = die_first
        run = quantize_run(model, CALIBRATED["a8w8 dynamic smoothquant"], None, data)
        folder = quantize.find_or_make(run, open_source(run.model), quantize.report.NO_PROGRESS)
        os.write(ended[1], b"found " if (folder / "config.json").is_file() else b"nothing ")
        os._exit(0)
codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
os.close(ended[1])
print(json.dumps([codes, sorted(os.read(ended[0], 1000).decode().split())]))
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))


def test_several_processes_make_a_model_once_also_when_the_first_is_killed(data: Path, tmp_path: Path) -> None:
    made = tmp_path / "quantized"
    arguments, environment = (
        json.dumps([str(LLAMA), str(data), str(made)]),
        os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    command = [sys.executable, "-c", DRIVER, arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout) == [[-signal.SIGKILL, 0, 0], ["found", "found", "made"]], done.stderr
    (folder,) = made.iterdir()  # no lock and nothing unfinished
    assert (folder / MANIFEST).is_file()


def test_what_is_made_is_said_at_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipelines.quantize_job.MADE", tmp_path / "quantized")
    with caplog.at_level(logging.WARNING):
        run = quantize_run(LLAMA, CALIBRATED["a8w8 static"], None, data)
        folder = find_or_make(run, open_source(run.model), report.NO_PROGRESS)
    what = f"calibrating {LLAMA} by quant=a8w8 on 6 samples of at most 16 tokens: about "
    assert re.search(rf"^{re.escape(what)}[\d,]+ s; it is kept in {re.escape(str(folder))}$", caplog.messages[0])
    assert not (folder / "report.md").exists()  # which task=quantize alone makes


def test_a_task_that_makes_the_same_model_waits(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then finds that it is there: no message speaks of another run that writes."""
    monkeypatch.setattr(quantize_job, "MADE", tmp_path / "quantized")
    run = replace(quantize_run(LLAMA, CALIBRATED["a8w8 dynamic smoothquant"], None, data), task=Task.quantize)
    make_model, waiting, refused = quantize.make_model, threading.Event(), []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("another run is making"):
                waiting.set()

    def make_by_task() -> None:
        with pytest.raises(UserError) as raised:
            quantize.run_quantize(run, tmp_path / "run", lambda *_: "")
        refused.append(str(raised.value))

    task, handler = threading.Thread(target=make_by_task), Noted()

    def beside_a_task(*arguments: Any, **options: Any) -> Any:
        task.start()
        assert waiting.wait(60)
        return make_model(*arguments, **options)

    monkeypatch.setattr(quantize, "make_model", beside_a_task)
    logging.getLogger().addHandler(handler)
    try:
        folder = find_or_make(run, open_source(run.model), report.NO_PROGRESS)
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
    """Notes when a line has come."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def flush(self) -> None:
        self.came.set()


def test_without_a_terminal_lines_tell_how_far_a_calibration_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr(sys, "stderr", lines)
    monkeypatch.setattr(report, "LINE_EVERY_S", 0.001)
    with report.progress_bar() as progress:
        with progress.calibrating():
            progress.loaded(5_000_000, 20_000_000)
            assert lines.came.wait(60)
            lines.came.clear()
            progress.quantized(3, 32)
            assert lines.came.wait(60)
            lines.came.clear()
            assert lines.came.wait(60)  # also while nothing is done
        told = lines.getvalue()
        progress.quantized(4, 32)
    assert re.search(r"^calibrating: 5 of 20 MB loaded, \d+ s$", told, re.MULTILINE)
    assert re.search(r"^calibrating: 3 of 32 layers done, \d+ s$", told, re.MULTILINE)
    assert lines.getvalue() == told
    assert not [thread for thread in threading.enumerate() if thread.name == "calibrating"]


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


def expected(run: RunConfig, monkeypatch: pytest.MonkeyPatch, **costs: float) -> float:
    """Seconds where these things alone cost something."""
    free = dict.fromkeys(Costs.__dataclass_fields__, 0.0)
    monkeypatch.setattr(quantize_estimate, "_measure", lambda *arguments: Costs(**free | costs))
    monkeypatch.setattr(quantize_estimate, "START_S", 0.0)
    return float(
        preflight(replace(run, task=Task.quantize), open_source(run.model)).duration.split()[1].replace(",", "")
    )


@pytest.mark.parametrize(
    ("scheme", "passes", "coded_passes"),
    [
        ("a8w8 dynamic smoothquant", 1, 0),
        ("a8w8 static", 1, 0),
        ("fp8 dynamic smoothquant, static cache", 1, 1),
        ("int8 gptq", 1, 1),
    ],
)
def test_the_estimate_counts_the_passes_that_are_made(
    scheme: str, passes: int, coded_passes: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations of products: two for each weight and token. Of the head there are none."""
    monkeypatch.setattr("pipelines.quantize_job.MADE", tmp_path / "quantized")
    run = quantize_run(LLAMA, CALIBRATED[scheme], None, data)
    model = preflight(run, open_source(run.model)).plan.model
    sizes = [layer.shape[0] * layer.shape[1] for name, layer in linear_specs(model).items() if ".layers." in name]
    once = 2.0 * 6 * 16 * sum(sizes)
    assert expected(run, monkeypatch, product=1.0) == pytest.approx(passes * once)
    assert expected(run, monkeypatch, coded_product=1.0) == pytest.approx(coded_passes * once)
    seen = _rows_through_the_first_layer(run, monkeypatch)
    assert seen.count(6 * 16) == passes + coded_passes  # all samples in a step
    assert max(set(seen) - {6 * 16}, default=0) <= 16  # the others are probes


def _rows_through_the_first_layer(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each time that it is computed, while the model is made."""
    rows: list[int] = []
    forward, first = DecoderLayer.forward, []

    def counted(self: DecoderLayer, stream: tuple[torch.Tensor, ...], *others: object) -> object:
        first.append(self)
        if self is first[0]:
            rows.append(len(stream[0]))
        return forward(self, stream, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(DecoderLayer, "forward", counted)
    find_or_make(run, open_source(run.model), report.NO_PROGRESS)
    return rows


def test_operations_of_gptq_and_of_searches_are_counted(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = quantize_run(LLAMA, CALIBRATED["int8 gptq"], None, data)
    shapes = [layer.shape for layer in linear_specs(preflight(run, open_source(run.model)).plan.model).values()]
    hessians_and_rounding = sum(2 * 6 * 16 * i * i + i**3 + o * i * i for o, i in shapes)
    monkeypatch.setattr(quantize_estimate, "_seconds", lambda work: 0.0)
    assert expected(run, monkeypatch, wide_product=1.0) == pytest.approx(hessians_and_rounding)
    clip = replace(run, quant=QuantConfig(QuantScheme.int8, auto_clip=True))
    assert expected(clip, monkeypatch, wide_product=1.0) == pytest.approx(10 * 2 * 512 * sum(o * i for o, i in shapes))
