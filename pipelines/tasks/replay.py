"""`run.py --replay FOLDER`: run a folder's config again, with the inputs of its run.lock, and compare the results."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from conf.errors import Difference, UserError
from conf.flags import Replay
from conf.schema import RunConfig, Task
from conf.support.terminal import escape_line
from conf.tasks import OutputForm
from pipelines.jobs.compared import Paths, files_difference, metrics_difference, rows_difference, vectors_difference
from pipelines.jobs.hub_commits import with_commits
from pipelines.jobs.report import LOCK, Dump
from pipelines.jobs.run_lock import describe
from pipelines.tasks.launch import launch

REFUSED = {
    Task.serve: "answers requests, which its folder does not hold",
    Task.chat: "answers a person, whose turns its folder does not hold",
    Task.bench: "measures times, which a replay does not compare",
}
RESULTS = {  # of a task whose results are in the run's folder
    Task.predict: "predictions.jsonl",
    Task.embed: "embeddings.npy",
    Task.score: "scores.jsonl",
    Task.evaluate: "metrics.json",
    Task.verify: "certificate.json",
}
MADE = "output"  # name in the new folder of the model or file that the task makes
REPORTS = ("report.md", "manifest.json")  # name the texts of calibration as they were given, and its digest
DIGITS = 12  # of a SHA-256 in a message

LockDifference = tuple[str, str]
"""One of DIFFERENCES, and its line."""


def run_replay(run: RunConfig, replay: Replay, dump: Dump) -> None:
    """Run `run`, which is the config of the folder, in a new folder next to it. Print "equal" if the results are equal.

    Raises Difference for a lock with a difference that is not allowed, and for the first difference of the results.
    Raises UserError for a folder that cannot be replayed.
    """
    folder = replay.folder
    if run.task in REFUSED:
        remedy = "run its config again with --config-path FOLDER"
        raise UserError(f"--replay={folder} is of task={run.task.name}, which {REFUSED[run.task]}: {remedy}")
    if "-" in (run.predict.data, run.prefix.data):
        raise UserError(f"--replay={folder} read standard input, which is not saved: run it with a file as data")
    lock, run = read_lock(folder), with_commits(run)
    before = _results_of(run, folder)
    if not before.exists():
        raise UserError(f"--replay={folder}: there is no {before}: give the folder of a finished run with its results")
    _check_lock(folder, list(lock_differences(lock, describe(run))), replay.allowed)
    again = folder.parent / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    again.mkdir()
    try:
        with suppress(Difference):  # of the run's own gate, which ends both runs
            launch(_in_folder(run, again), again, dump)
    finally:
        with suppress(OSError):  # it has files
            again.rmdir()
    if difference := _COMPARED[run.task](Paths(before, _results_of(_in_folder(run, again), again))):
        raise Difference(f"different: {difference}")
    print("equal")


def read_lock(folder: Path) -> dict[str, Any]:
    """Return the run.lock of a run's folder. Raises UserError for a file that is missing or damaged."""
    try:
        lock = json.loads((folder / LOCK).read_bytes())
        if all(isinstance(lock[name], dict) for name in ("files", "packages", "seeds")):
            return dict(lock)
        raise TypeError("it lacks files, packages or seeds")
    except FileNotFoundError as error:
        remedy = "give the folder of a finished run, or run it again with --config-path FOLDER"
        raise UserError(f"{folder} has no {LOCK}: {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        remedy = "run it again with --config-path FOLDER"
        raise UserError(f"{folder / LOCK} is damaged ({type(error).__name__}: {error}): {remedy}") from error


def lock_differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[LockDifference]:
    """Yield the differences of two locks."""
    for name in sorted(before["files"] | now["files"]):
        old, new = (lock["files"].get(name) or {} for lock in (before, now))
        if (digest := old.get("sha256")) != new.get("sha256"):
            path = new.get("path") or old.get("path")
            yield "file", f"{name} ({path}): {_digest(digest)} before, {_digest(new.get('sha256'))} now"
    for name in sorted(before["packages"] | now["packages"]):
        old, new = before["packages"].get(name), now["packages"].get(name)
        if old != new:
            yield "package", f"{name}: {old or 'none'} before, {new or 'none'} now"
    same_processor = before.get("instruction_set") == now["instruction_set"]
    if same_processor and before.get("kernels") != now["kernels"]:
        libraries = ((lock.get("kernels") or {}).get("library", "none") for lock in (before, now))
        yield "package", f"kernels: {' before, '.join(libraries)} now"
    for name in ("processor", "instruction_set", "gpu"):
        if before.get(name) != now[name]:
            yield "processor", f"{name}: {before.get(name)} before, {now[name]} now"


def _digest(sha256: str | None) -> str:
    return f"sha256 {sha256[:DIGITS]}" if sha256 else "missing"


def _check_lock(folder: Path, differences: list[LockDifference], allowed: frozenset[str]) -> None:
    """Print each difference. Raises Difference if one is not allowed."""
    for kind, line in differences:
        print(escape_line(f"{kind} {line}"), file=sys.stderr)
    if refused := sorted({kind for kind, _ in differences} - allowed):
        kinds = ",".join(sorted({*refused, *allowed}))
        raise Difference(f"{folder / LOCK} differs from this machine: restore what is named, or give --allow={kinds}")


def _in_folder(run: RunConfig, folder: Path) -> RunConfig:
    """Return the run with all its outputs in `folder`, and without a job to resume."""
    predict = replace(run.predict, resume="none", output_file=None, output_form=OutputForm.predictions)
    if run.task.reads_rows:
        return replace(run, predict=predict)
    if run.task in RESULTS:
        return run
    name, made = run.task.name, str(folder / MADE)
    unset = {} if run.task is Task.prefix else {"overwrite": False}
    return replace(run, **{name: replace(getattr(run, name), output=made, **unset)})


def _results_of(run: RunConfig, folder: Path) -> Path:
    """Return the file or the model folder that is compared."""
    if run.task in RESULTS:
        return folder / RESULTS[run.task]
    if run.task is Task.quantize and run.quantize.output is None:
        from pipelines.tasks.quantize import default_folder  # here, because only this task needs its imports

        return default_folder(run)
    return Path(getattr(run, run.task.name).output).expanduser()


_COMPARED: dict[Task, Callable[[Paths], str | None]] = {
    Task.predict: rows_difference,
    Task.score: rows_difference,
    Task.embed: vectors_difference,
    Task.evaluate: metrics_difference,
    Task.verify: metrics_difference,
    Task.convert: files_difference,
    Task.quantize: lambda paths: files_difference(paths, REPORTS),
    Task.export: files_difference,
    Task.prefix: files_difference,
}
