"""Log a run, or a sweep as a parent with its jobs as children, to the tracker of `tracker`. Only this module uses MLflow.

A tracker that fails never fails the run: the log has one warning.
"""

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from conf.schema import RunConfig
from conf.tracker import Tracker, TrackerConfig
from pipelines.jobs.report import Dump

log = logging.getLogger(__name__)

EXTRA = ("mlflow", "sqlalchemy", "alembic")  # packages of the extra mlflow
JOB = "job.json"  # in the folder of a sweep's job
NOT_OF_THE_RUN = ("defaults", "hydra")  # sections of config.yaml
LOGGED = (".yaml", ".json", ".md", ".csv", ".png", ".lock")
"""Suffixes of a folder's files that are logged. Results of rows (.jsonl, .npy) stay in the folder."""
BATCH = 100  # most params, and most metrics here, of one call
VALUE = 6000  # most characters of a param
REASON = 400  # most characters of a warning's reason
QUIET = {  # MLflow's own switches, unless the user has set them: a server that is away costs seconds, not minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
QUIET_LOGS = {"mlflow": logging.WARNING, "alembic": logging.WARNING, "urllib3": logging.ERROR}  # a retry is no warning


@contextmanager
def tracked(run: RunConfig, dump: Dump) -> Iterator[Dump]:
    """Yield `dump`, and log the folder of the run after the block, also if the block raises.

    A job of a sweep is not logged here: `track_sweep` logs it with its sweep.
    """
    folders: list[Path] = []

    def noted(run: RunConfig, folder: Path) -> str:
        folders.append(folder)  # of an earlier process, if the job is resumed
        return dump(run, folder)

    if run.tracker.kind is Tracker.none:
        yield dump
        return
    error: BaseException | None = None
    try:
        yield noted
    except BaseException as caught:
        error = caught
        raise
    finally:
        if folders and not _is_unfinished_job(folders[-1]):
            _try(run.tracker, lambda: _Client(run.tracker).log_folder(folders[-1], run.task.name, error is not None))


def track_sweep(folder: Path, job_folders: list[Path]) -> None:
    """Log a finished sweep, with its table and its picture, and each of its jobs as a child."""
    configs = [_config(job) for job in job_folders]
    sections = [config["tracker"] for config in configs if isinstance(config.get("tracker"), dict)]
    section = next((section for section in sections if section.get("kind") != Tracker.none.name), None)
    if section is None:
        return
    tracker = TrackerConfig(Tracker[section["kind"]], section["uri"], section["experiment"])

    def log_all() -> None:
        client = _Client(tracker)
        failed = [bool(_json(job / JOB).get("error")) for job in job_folders]
        parent = client.log_folder(folder, f"sweep {folder.name}", any(failed))
        for job, has_failed in zip(job_folders, failed, strict=True):
            client.log_folder(job, os.path.relpath(job, folder), has_failed, parent)

    _try(tracker, log_all)


class _Client:
    """MLflow's client, with the experiment of a run."""

    def __init__(self, tracker: TrackerConfig) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import mlflow  # here, because it is an extra

        for name, level in QUIET_LOGS.items():
            logging.getLogger(name).setLevel(level)
        self._client = mlflow.MlflowClient(tracker.uri)
        experiment = self._client.get_experiment_by_name(tracker.experiment)
        self._experiment = experiment.experiment_id if experiment else self._create(tracker)

    def _create(self, tracker: TrackerConfig) -> str:
        """Create the experiment. The files of a local SQLite store are in the folder of its database."""
        file = re.fullmatch(r"sqlite:///(.+)", tracker.uri or "")
        artifacts = (Path(file[1]).absolute().parent / "artifacts").as_uri() if file else None
        return str(self._client.create_experiment(tracker.experiment, artifact_location=artifacts))

    def log_folder(self, folder: Path, name: str, has_failed: bool, parent: str | None = None) -> str:
        """Log the config, metrics and files of a folder as one run. Return its id."""
        from mlflow.entities import Metric, Param

        tags = {"quintet.folder": str(folder)} | ({} if parent is None else {"mlflow.parentRunId": parent})
        id = self._client.create_run(self._experiment, tags=tags, run_name=name).info.run_id
        status = "FAILED"
        try:
            settings = [Param(_name(key), str(value)[:VALUE]) for key, value in _flat(_config(folder))]
            numbers = [(key, value) for key, value in _flat(_json(folder / "metrics.json")) if _is_finite(value)]
            now = int(time.time() * 1e3)
            metrics = [Metric(_name(key), float(value), now, 0) for key, value in numbers]
            for start in range(0, max(len(settings), len(metrics)), BATCH):
                part = slice(start, start + BATCH)
                self._client.log_batch(id, metrics=metrics[part], params=settings[part])
            for file in sorted(folder.iterdir()):
                if file.is_file() and file.suffix in LOGGED:
                    self._client.log_artifact(id, str(file))
            status = "FAILED" if has_failed else "FINISHED"
        finally:
            self._client.set_terminated(id, status)
        return str(id)


def _try(tracker: TrackerConfig, log_run: Callable[[], object]) -> None:
    try:
        log_run()
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        remedy = "'quintet[mlflow]'" if package in EXTRA else package  # a database's driver
        log.warning("tracker=mlflow needs the package %s: pip install %s", package, remedy)
    except Exception as error:
        reason = re.sub(r"//[^/@\s]*@", "//", " ".join(str(error).split()))  # without a password
        problem = reason[:REASON].rstrip(".") or type(error).__name__
        log.warning("tracker.uri=%s failed: %s: the run's files are in its folder", tracker.uri, problem)


def _is_unfinished_job(folder: Path) -> bool:
    """Whether a sweep runs a job in this folder: its record says that it did not finish until it has."""
    return _json(folder / JOB).get("error") == "did not finish"


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # a job that failed before it wrote one, or a sweep
        return {}
    config = config if isinstance(config, dict) else {}
    return {key: value for key, value in config.items() if key not in NOT_OF_THE_RUN}


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _name(key: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", key)[:250]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
