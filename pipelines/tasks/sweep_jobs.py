"""The jobs of a sweep, read from the files in their folders, and joined to rows."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Value = str | int | float | None
RECORD = "job.json"
PEAK_MEMORY = "peak_memory_bytes"
SHARE = "share_of_windows"  # of evaluate.data, scored by a job of a sweep with sweep.halving
TASK = "task"
STDERR, CI95 = "_stderr", "_ci95"  # endings of the names of a metric's standard error and 95 % interval


@dataclass(frozen=True)
class SweepJob:
    """A row of the table.

    `metrics` are flat: a percentile is `time_to_first_token_s.p50`, the 95 % interval of a metric M is from `M_ci95_low`
    to `M_ci95_high`.
    """

    name: str
    overrides: dict[str, str]
    metrics: dict[str, Value]
    error: str | None
    folders: tuple[Path, ...] = ()
    """The folders of the job, or of the jobs that share the row."""

    def number(self, metric: str) -> float | None:
        value = self.metrics.get(metric)
        return value if isinstance(value, int | float) else None

    @property
    def share_of_windows(self) -> float | None:
        """The share of the windows that a job with sweep.halving scored. Less than 1: it stopped."""
        return self.number(SHARE)

    @property
    def is_stopped(self) -> bool:
        return self.share_of_windows is not None and self.share_of_windows < 1

    def end(self, metric: str, is_upper: bool) -> float | None:
        """Return the upper or lower end of a metric's 95 % interval; its value if it has no interval."""
        end = self.number(f"{metric}{CI95}_{'high' if is_upper else 'low'}")
        return self.number(metric) if end is None else end

    def label(self, keys: list[str]) -> str:
        """Return the job's name with the given overrides, for messages."""
        overrides = " ".join(f"{key}={self.overrides[key]}" for key in keys if key in self.overrides)
        return f"job {self.name} ({overrides})" if overrides else f"job {self.name}"


@dataclass(frozen=True)
class Sweep:
    id: str
    """Identifies the jobs, because the folder may contain jobs of an earlier sweep."""
    dir: str

    @property
    def folder(self) -> Path:
        return Path(os.path.abspath(self.dir))


def read_record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def read_jobs(sweep: Sweep) -> tuple[list[SweepJob], list[dict[str, Any]]]:
    """Return the jobs of a sweep and their records, ordered by number."""
    by_folder = {file.parent: read_record(file) for file in sweep.folder.rglob(RECORD)}
    folders = [folder for folder, record in by_folder.items() if record.get("sweep") == sweep.id]
    folders.sort(key=lambda folder: by_folder[folder]["number"])
    jobs = [read_job(folder, os.path.relpath(folder, sweep.folder)) for folder in folders]
    return jobs, [by_folder[folder] for folder in folders]


def read_job(folder: Path, name: str) -> SweepJob:
    job = read_record(folder / RECORD)
    pairs = [override.partition("=") for override in job["overrides"]]
    metrics: dict[str, Value] = {}
    # The folder of a failed job may contain the metrics of an earlier sweep.
    if job["error"] is None and (file := folder / "metrics.json").exists():
        metrics = dict(_flat(json.loads(file.read_text(encoding="utf-8"))))
    error = job["error"] and _writable(job["error"])
    overrides = {key: _writable(_unquoted(value)) for key, _, value in pairs}
    return SweepJob(name, overrides, metrics, error, (folder,))


def join_tasks(jobs: list[SweepJob]) -> list[SweepJob]:
    groups: dict[frozenset[tuple[str, str]], list[SweepJob]] = {}
    for job in jobs:
        groups.setdefault(frozenset((key, v) for key, v in job.overrides.items() if key != TASK), []).append(job)
    rows = []
    for group in groups.values():
        tasks = {job.overrides.get(TASK) for job in group}
        rows += [_side_by_side(group)] if len(tasks) == len(group) > 1 else group
    return rows


def _side_by_side(group: list[SweepJob]) -> SweepJob:
    """Return one row for jobs that differ only in their task.

    A metric that several tasks measured is shown once if the values agree, else once per task with the task in its
    name. The peak memory is the maximum over the tasks.
    """
    metrics: dict[str, Value] = {}
    for job in group:
        other_metrics = [other.metrics for other in group if other is not job]
        for name, value in job.metrics.items():
            agreed = all(other.get(name, value) == value for other in other_metrics)
            metrics[name if agreed else f"{job.overrides.get(TASK)}.{name}"] = value
    if peaks := [peak for job in group if isinstance(peak := job.metrics.get(PEAK_MEMORY), int)]:
        metrics[PEAK_MEMORY] = max(peaks)
    errors = [f"{job.overrides.get(TASK)}: {job.error}" for job in group if job.error]
    tasks = " + ".join(str(job.overrides.get(TASK)) for job in group)
    name = " + ".join(job.name for job in group)
    folders = tuple(folder for job in group for folder in job.folders)
    return SweepJob(name, group[0].overrides | {TASK: tasks}, metrics, "; ".join(errors) or None, folders)


def _flat(metrics: dict[str, object], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in metrics.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif key.endswith(CI95):
            if isinstance(value, list) and len(value) == 2:
                yield from _flat({f"{key}_low": value[0], f"{key}_high": value[1]}, prefix)
        elif value is None or isinstance(value, int | float):
            yield prefix + key, value
        elif isinstance(value, str):
            yield prefix + key, _writable(value)


def _unquoted(value: str) -> str:
    """Return the value without the quotes or backslashes of Hydra's grammar."""
    if quoted := re.fullmatch(r"""(['"])(.*)\1""", value, re.DOTALL):
        return quoted[2].replace("\\" + quoted[1], quoted[1])
    return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", value)


def _writable(text: str) -> str:
    """Return the text with half surrogate pairs, which an argument or an error may contain, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
