"""Runs and sweeps in an MLflow store of SQLite, read back by MLflow's client, and stores that fail."""

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import dump
from conf.errors import UserError
from conf.saved import as_saved
from conf.schema import RunConfig
from conf.tasks import SweepConfig
from conf.tracker import Tracker, TrackerConfig
from pipelines.jobs.report import Dump, write_run
from pipelines.jobs.tracker import QUIET
from pipelines.tasks.launch import launch
from pipelines.tasks.sweep import recorded_job, write_sweep
from pipelines.tasks.sweep_jobs import Sweep
from tests.helpers.builders import REPOSITORY, run_config
from tests.helpers.cases import each


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path / "outputs"))
    for name in QUIET:  # which the tracker sets
        monkeypatch.setenv(name, QUIET[name])


def tracked_run(uri: str) -> RunConfig:
    return replace(run_config(REPOSITORY / "models/tiny"), tracker=TrackerConfig(Tracker.mlflow, uri, "mine"))


def leave(run: RunConfig, folder: Path, metrics: dict[str, Any], error: Exception | None = None) -> None:
    """Launch a task that writes its files at once, and may then fail."""

    def run_task(run: RunConfig, folder: Path, dump: Dump) -> None:
        write_run(folder, dump(run, folder), {"metrics.json": json.dumps(metrics), "rows.jsonl": "{}"})
        if error:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.tasks.launch._run_task", run_task)
        launch(run, folder, dump)


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
        with recorded_job(sweep, folder, number, [f"seed={number}"], vars(SweepConfig())):
            leave(run, folder, {"tokens_per_s": float(number)})
    write_sweep(sweep)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("mine")
    runs = {logged.info.run_name: logged for logged in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["0", "1", "predict", "sweep sweep"]  # the jobs once, as children alone
    everything = client.search_runs([experiment.experiment_id])
    alone = next(logged for logged in everything if "a" in logged.data.metrics)
    assert alone.data.metrics == {"a": 1.5, "p.p50": 2.0}
    assert alone.data.params["model.path"] == str(REPOSITORY / "models/tiny")
    assert alone.data.params["tracker.experiment"] == "mine"
    assert alone.info.status == "FINISHED"
    artifacts = {file.path for file in client.list_artifacts(alone.info.run_id)}
    assert artifacts == {"config.yaml", "environment.json", "metrics.json", "run.lock"}
    assert [logged.info.status for logged in everything].count("FAILED") == 1
    parent = runs["sweep sweep"].info.run_id
    assert {file.path for file in client.list_artifacts(parent)} >= {"sweep.csv", "sweep.md"}
    for number in ("0", "1"):
        assert runs[number].data.tags["mlflow.parentRunId"] == parent
        assert runs[number].data.metrics == {"tokens_per_s": float(number)}
    assert not caplog.records


STORES = ["http://127.0.0.1:9", "unknown://host/store", "sqlite:////proc/none/mlflow.db"]


@each("uri", [*STORES, "none"])
def test_a_store_that_fails_is_one_warning(
    uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if uri == "none":
        monkeypatch.setitem(sys.modules, "mlflow", None)  # not installed
        uri = STORES[0]
    is_installed = importlib.util.find_spec("mlflow") is not None
    leave(tracked_run(uri), tmp_path / "run", {"a": 1})
    (record,) = caplog.records
    message = f"tracker.uri={uri} failed: .*: the run's files are in its folder"
    package = re.escape("tracker=mlflow needs the package mlflow: pip install 'quintet[mlflow]'")
    assert re.fullmatch(message if is_installed else package, record.getMessage())
    assert {"metrics.json", "run.lock"} <= {file.name for file in (tmp_path / "run").iterdir()}


def test_a_config_names_its_store_without_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_saved(tracked_run("sqlite:///runs.db")).tracker.uri == f"sqlite:///{tmp_path}/runs.db"
    for uri in ("sqlite:////a/b.db", "http://host:5000", "postgresql+psycopg2://user@host/db", "databricks"):
        assert as_saved(tracked_run(uri)).tracker.uri == uri
    for uri in ("http://user:secret@host", "postgresql://u:p@host/db", "runs.db", ""):
        with pytest.raises(UserError, match="give a URI without a password") as raised:
            tracked_run(uri)
        assert raised.value.key == "tracker.uri"
