"""Runs and sweeps in an MLflow store of SQLite, read back by MLflow's client, and stores that fail."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import dump
from conf.schema import RunConfig
from conf.tracker import Tracker, TrackerConfig
from pipelines.jobs.report import write_run
from pipelines.jobs.tracker import tracked
from pipelines.tasks.sweep import Sweep, recorded_job, write_sweep
from tests.helpers.builders import run_config
from tests.helpers.cases import each


def tracked_run(uri: str) -> RunConfig:
    return replace(run_config(Path("model")), tracker=TrackerConfig(Tracker.mlflow, uri, "mine"))


def leave(run: RunConfig, folder: Path, metrics: dict[str, Any], error: Exception | None = None) -> None:
    """Write the files of a run as a task does, inside its tracker."""
    with tracked(run, dump) as noted:
        write_run(folder, noted(run, folder), {"metrics.json": json.dumps(metrics), "rows.jsonl": "{}"})
        if error:
            raise error


@pytest.mark.long  # MLflow makes its tables in seconds
def test_a_run_and_a_sweep_are_in_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run = tracked_run(uri)
    leave(
        run, tmp_path / "alone", {"a": 1.5, "p": {"p50": 2}, "none": None, "is": True, "name": "x", "nan": float("nan")}
    )
    with pytest.raises(ValueError, match="ends"):
        leave(run, tmp_path / "failed", {}, ValueError("ends"))
    sweep = Sweep("this", str(tmp_path / "sweep"))
    for number in range(2):
        folder = sweep.folder / str(number)
        folder.mkdir(parents=True)
        with recorded_job(sweep, folder, number, [f"seed={number}"]):
            leave(run, folder, {"tokens_per_s": float(number)})
    write_sweep(sweep)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("mine")
    runs = {logged.info.run_name: logged for logged in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["0", "1", "predict", "sweep sweep"]  # the jobs once, as children alone
    everything = client.search_runs([experiment.experiment_id])
    alone = next(logged for logged in everything if "a" in logged.data.metrics)
    assert alone.data.metrics == {"a": 1.5, "p.p50": 2.0}
    assert alone.data.params["model.path"] == "model"
    assert alone.data.params["tracker.experiment"] == "mine"
    assert alone.info.status == "FINISHED"
    artifacts = {file.path for file in client.list_artifacts(alone.info.run_id)}
    assert artifacts == {"config.yaml", "environment.json", "metrics.json"}
    assert [logged.info.status for logged in everything].count("FAILED") == 1
    parent = runs["sweep sweep"].info.run_id
    assert {file.path for file in client.list_artifacts(parent)} >= {"sweep.csv", "sweep.md"}
    for number in ("0", "1"):
        assert runs[number].data.tags["mlflow.parentRunId"] == parent
        assert runs[number].data.metrics == {"tokens_per_s": float(number)}
    assert not caplog.records


@each("uri", ["unknown://user:secret@host/store", "sqlite:////proc/none/mlflow.db"])
def test_a_store_that_fails_is_one_warning(uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave(tracked_run(uri), tmp_path / "run", {"a": 1})  # without the package the warning says how to install it
    (record,) = caplog.records
    assert "does not have this run" in record.getMessage()
    assert "secret" not in caplog.text
    assert (tmp_path / "run" / "metrics.json").exists()
