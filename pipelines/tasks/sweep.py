"""A sweep: the record of each job, and finally a table and a picture of all jobs.

A job is read only from the files in its folder, whichever process ran it: `job.json` (its sweep, number, overrides and
error) and `metrics.json`. Jobs whose overrides differ only in the task, as in `-m task=bench,evaluate quant=none,int8`,
share a row, so that speed and quality of a choice can be compared.
"""

import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.errors import UserError, list_known_names
from conf.selection import KEY, parse_selection
from conf.support.signals import reader_may_leave
from conf.support.terminal import escape_control_chars, escape_line
from pipelines.jobs import report
from pipelines.jobs.tracker import track_sweep
from pipelines.tasks.sweep_choice import Choice, choose, remove_best, why_none, write_best
from pipelines.tasks.sweep_difference import Differences, differences_from
from pipelines.tasks.sweep_jobs import RECORD, Sweep, SweepJob, join_tasks, read_job, read_jobs, read_record
from pipelines.tasks.sweep_picture import draw
from pipelines.tasks.sweep_table import (
    Table,
    all_metrics,
    as_csv,
    as_markdown,
    main_metrics,
    make_table,
    varied_overrides,
)

SETTINGS = ("select", "baseline", "halving")


@contextmanager
def recorded_job(
    sweep: Sweep, folder: Path, number: int, overrides: list[str], settings: Mapping[str, Any]
) -> Iterator[None]:
    """Write `job.json` into the folder. An error in the block ends only this job; an interrupt ends the sweep.

    settings: the settings of the sweep, which `write_sweep` and `sweep.halving` read from the records.

    Raises UserError for a folder outside the sweep's folder, and for a folder that another job of the sweep uses.
    """
    remedy = "give hydra.sweep.subdir=${hydra:job.num}"
    if not folder.is_relative_to(sweep.folder):
        raise UserError(f"job {number} of the sweep would write {folder}, which is not in {sweep.folder}: {remedy}")
    if read_record(folder / RECORD).get("sweep") == sweep.id:
        raise UserError(f"two jobs of the sweep would write {folder}: {remedy}")

    def record(error: str | None) -> None:
        job = {"sweep": sweep.id, "dir": str(sweep.folder), "number": number, "overrides": overrides, "error": error}
        job |= {name: settings[name] for name in SETTINGS}
        report.write_atomically(folder / RECORD, [json.dumps(job, indent=2) + "\n"])

    record("did not finish")  # remains if the process is killed
    error = None
    try:
        yield
    except (UserError, OSError) as caught:
        error = " ".join(str(caught).split())
    except Exception as caught:
        print(escape_control_chars(traceback.format_exc()), end="", file=sys.stderr)
        error = " ".join(f"{type(caught).__name__}: {caught}".split())
    if error:
        print(escape_control_chars(f"error: {error}"), file=sys.stderr)
    record(error)


def objective(folder: Path, names: str | Iterable[str] | None) -> float | list[float] | None:
    """Return the metrics that `sweep.objective` names, for Hydra's sweeper.

    None without a name, and if the job failed or a value is null. Raises UserError for an unknown metric.
    """
    if names is None or (job := read_job(folder, "")).error:
        return None
    metric_names = [names] if isinstance(names, str) else list(names)
    numbers = {name: value for name, value in job.metrics.items() if not isinstance(value, str)}
    if unknown := [name for name in metric_names if name not in numbers]:
        raise UserError(
            f"sweep.objective={unknown[0]} is no metric of the job: {list_known_names(numbers, unknown[0])}"
        )
    values = [float(value) for name in metric_names if (value := numbers[name]) is not None]
    if len(values) < len(metric_names):
        return None
    return values[0] if isinstance(names, str) else values


def write_sweep(sweep: Sweep) -> str | None:
    """Write the table of the sweep's jobs and the chosen job's config into its folder, and print both.

    Return an error line if jobs failed, if sweep.select chooses no job, or if sweep.baseline is no row.
    """
    read, records = read_jobs(sweep)
    if not read:  # it ended before its first job
        return None
    select, baseline, halving = (records[0].get(name) for name in SETTINGS)
    jobs = join_tasks(read)
    keys = varied_overrides(jobs)
    problems = []
    if num_failed := sum(job.error is not None for job in read):
        problems.append(f"{num_failed} of {len(read)} jobs failed: see {sweep.folder / 'sweep.md'}")
    if baseline and baseline >= len(jobs):
        problems.append(f"sweep.baseline={baseline} is no row of the table: give 0 to {len(jobs) - 1}")
    if halving and all(job.share_of_windows is None for job in jobs):
        problems.append("sweep.halving had no windows: give task=evaluate evaluate.data=FILE, or leave it out")
    try:
        choice = choose(jobs, parse_selection(select)) if select and num_failed < len(read) else None
    except UserError as error:  # the table has the measurements nevertheless
        choice, problems = None, [*problems, str(error)]
    table = _write_table(sweep.folder, jobs, keys, choice, differences_from(jobs, baseline or 0))
    chosen = ""
    try:
        chosen = _written_choice(sweep.folder, jobs, keys, choice)
    except (UserError, OSError) as error:
        problems.append(str(error))
    with reader_may_leave():
        print()
        report.print_columns(table)
        print(chosen, end="")
        print(f"output: {sweep.folder}")
    track_sweep(sweep.folder, [folder for job in read for folder in job.folders])
    return "; ".join(problems) or None


def _written_choice(folder: Path, jobs: list[SweepJob], keys: list[str], choice: Choice | None) -> str:
    """Write the chosen job's config, and return the line to print, empty without sweep.select.

    Raises UserError if no job was chosen.
    """
    remove_best(folder)
    if choice is None:
        return ""
    if choice.chosen is None:
        raise UserError(why_none(jobs, keys, choice.selection))
    job = jobs[choice.chosen]
    best = write_best(folder, job, choice.selection.objective)
    return escape_line(f"{KEY} chose {job.label(keys)}: run.py --config-path {best}") + "\n"


def _write_table(
    folder: Path, jobs: list[SweepJob], keys: list[str], choice: Choice | None, differences: list[Differences]
) -> Table:
    """Write sweep.csv, sweep.md and sweep.png. Return the table of sweep.md."""
    table = make_table(jobs, keys, choice, main_metrics(jobs, differences))
    csv = as_csv(make_table(jobs, keys, choice, all_metrics(jobs, differences)))
    report.write_atomically(folder / "sweep.csv", [csv])
    report.write_atomically(folder / "sweep.md", [as_markdown(table)])
    if picture := draw(jobs, keys, choice):
        report.write_atomically(folder / "sweep.png", picture)
    else:
        (folder / "sweep.png").unlink(missing_ok=True)  # from an earlier sweep into the same folder
    return table
