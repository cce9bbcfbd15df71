"""sweep.halving: when a job stops, by hand-made samples; and a sweep of the bundled model."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conf.compose import dump
from conf.errors import UserError
from conf.quantization import QuantConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType, ModelConfig, RunConfig, Task
from conf.selection import parse_selection
from conf.tasks import EvaluateConfig, SweepConfig
from models.tiny.corpus import documents
from pipelines.tasks.evaluate_halving import Race, open_race
from pipelines.tasks.launch import launch
from pipelines.tasks.sweep import recorded_job, write_sweep
from pipelines.tasks.sweep_jobs import Sweep
from tests.helpers.sweep_folders import check_names, leave, rows

Samples = list[dict[str, Any]]


def samples(kl: float, count: int = 20, seed: int = 0, spread: float = 0.1) -> Samples:
    """Return windows of 10 tokens whose divergence per token is `kl`, give or take a tenth."""
    noise = Random(seed)
    lines = [{"kind": "window", "id": f"0:{i}", "input": f"digest {i}", "num_tokens": 10} for i in range(count)]
    return [line | {"nll": 20 + (d := kl * 10 * noise.uniform(1 - spread, 1 + spread)), "kl": d} for line in lines]


def finished(folder: Path, number: int, lines: Samples, error: str | None = None, **metrics: float) -> None:
    means = {"kl_mean": sum(line["kl"] for line in lines) / 10 / len(lines), "evaluate_s": 1.0}
    leave(folder / str(number), [f"quant={number}"], {"share_of_windows": 1.0} | means | metrics, error)
    (folder / str(number) / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def race(folder: Path, select: str = "min kl_mean") -> Race:
    return Race(Sweep("this", str(folder)), parse_selection(select), 0)


def test_a_job_stops_when_its_interval_is_worse(tmp_path: Path) -> None:
    assert not race(tmp_path).is_lost(samples(9.0))  # no job has finished
    finished(tmp_path, 0, samples(0.1), memory_bytes=5e9, peak_memory_bytes=5e9)
    assert race(tmp_path).is_lost(samples(0.2, 8))
    assert not race(tmp_path).is_lost(samples(0.2, 5))  # too few windows for an interval
    assert not race(tmp_path).is_lost(samples(0.1, 8, seed=1))  # not distinguishable
    assert not race(tmp_path).is_lost(samples(0.05, 8))
    assert race(tmp_path, "max kl_mean").is_lost(samples(0.05, 8))
    assert not race(tmp_path, "max decode_tokens_per_s").is_lost(samples(9.0))  # not measured by windows
    assert not race(tmp_path, "peak_memory<=4GB, min kl_mean").is_lost(samples(0.2))  # job 0 cannot be chosen
    assert race(tmp_path, "peak_memory<=6GB, min kl_mean").is_lost(samples(0.2))
    assert race(tmp_path, "peak_memory<=4GB, evaluate.kl_mean<=0.1, min kl_mean").is_lost(samples(0.2))
    mean = sum(line["kl"] for line in samples(0.2)) / 200
    assert not race(tmp_path, f"kl_mean<={mean:.4f}, max accuracy").is_lost(samples(0.2))  # within the interval
    assert race(tmp_path, f"kl_mean<={mean - 0.01:.4f}, max accuracy").is_lost(samples(0.2))
    assert race(tmp_path, "perplexity<=7, max accuracy").is_lost(samples(0.2))  # it is exp(2.2), about 9
    assert not race(tmp_path, "perplexity<=10, max accuracy").is_lost(samples(0.2))
    other = [line | {"input": "of other data"} for line in samples(0.2)]
    assert not race(tmp_path).is_lost(other)
    finished(tmp_path, 1, samples(0.01), share_of_windows=0.25)  # stopped itself
    finished(tmp_path, 2, samples(0.01), error="did not finish")
    assert not race(tmp_path).is_lost(samples(0.09, seed=1))
    finished(tmp_path, 3, samples(0.01))
    assert race(tmp_path).is_lost(samples(0.09, seed=1))


def test_a_sweep_of_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path / "outputs"))
    text = tmp_path / "text.txt"
    text.write_text("\n".join(islice(documents(7), 150)))
    device, evaluate = (
        DeviceConfig(type=DeviceType.cpu),
        EvaluateConfig(data=str(text), reference="models/tiny", window=32),
    )
    base = RunConfig(task=Task.evaluate, model=ModelConfig(path="models/tiny"), device=device, evaluate=evaluate)
    sweep = Sweep("this", str(tmp_path / "sweep"))
    schemes = (QuantScheme.int8, QuantScheme.int4, QuantScheme.none)
    settings = SweepConfig(halving=True)
    for number, scheme in enumerate(schemes):
        quant = QuantConfig(scheme, group_size=32 if scheme is QuantScheme.int4 else -1, probe=False)
        run = replace(base, quant=quant, sweep=settings)
        folder = sweep.folder / str(number)
        folder.mkdir(parents=True)
        with recorded_job(sweep, folder, number, [f"quant={scheme.name}"], vars(settings)):
            launch(run, folder, dump)
        assert open_race(folder, True, 0).selection == parse_selection("min kl_mean")
        assert open_race(folder, False, 0).selection == parse_selection("min perplexity")
    launch(replace(base, quant=replace(quant, scheme=QuantScheme.int4, group_size=32)), tmp_path / "full", dump)
    lines = [
        (path / "samples.jsonl").read_text().splitlines()
        for path in (sweep.folder / "1", tmp_path / "full", sweep.folder / "0")
    ]
    assert 6 <= len(lines[0]) <= len(lines[1]) / 4 + 1
    assert len(lines[2]) == len(lines[1])
    assert set(lines[0]) < set(lines[1])  # equal to the bit
    assert lines[0] != lines[1][: len(lines[0])]  # drawn from the whole text
    metrics = json.loads((sweep.folder / "1" / "metrics.json").read_text())
    assert metrics["share_of_windows"] == len(lines[0]) / len(lines[1])
    check_names(metrics)
    assert write_sweep(sweep) is None
    assert [row["share_of_windows"] for row in rows(sweep.folder)] == ["1.0", str(metrics["share_of_windows"]), "1.0"]
    assert "windows scored (%)" in (sweep.folder / "sweep.md").read_text()


def test_halving_that_is_not_used_is_refused(tmp_path: Path) -> None:
    gate = EvaluateConfig(data="models/tiny/prompts.txt", reference="models/tiny", gate={"kl_mean": 0.1})
    run = RunConfig(task=Task.evaluate, evaluate=gate, sweep=SweepConfig(halving=True))
    with pytest.raises(UserError, match=r"evaluate.gate is not used with sweep.halving"):
        launch(run, tmp_path / "run", dump)
    leave(tmp_path / "sweep" / "0", ["quant=int8"], {"tokens_per_s": 1.0}, settings={"halving": True})
    problem = write_sweep(Sweep("this", str(tmp_path / "sweep")))
    assert problem == "sweep.halving had no windows: give task=evaluate evaluate.data=FILE, or leave it out"
