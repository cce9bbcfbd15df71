"""A sweep: the record of each job, and finally a table and a picture of all jobs.

A job is read only from the files in its folder, whichever process ran it: `job.json` (its sweep, number, overrides and
error) and `metrics.json`. Jobs whose overrides differ only in the task, as in `-m task=bench,evaluate quant=none,int8`,
share a row, so that speed and quality of a choice can be compared.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import UserError, list_known_names
from conf.support.signals import reader_may_leave
from conf.support.terminal import escape_control_chars
from pipelines.jobs import report
from pipelines.jobs.tracker import track_sweep
from pipelines.tasks.sweep_jobs import RECORD, Sweep, join_tasks, read_job, read_record
from pipelines.tasks.sweep_picture import draw
from pipelines.tasks.sweep_table import all_metrics, as_csv, as_markdown, main_metrics, make_table, varied_overrides


@contextmanager
def recorded_job(sweep: Sweep, folder: Path, number: int, overrides: list[str]) -> Iterator[None]:
    """Write `job.json` into the folder. An error in the block ends only this job; an interrupt ends the sweep.

    Raises UserError for a folder outside the sweep's folder, and for a folder that another job of the sweep uses.
    """
    remedy = "give hydra.sweep.subdir=${hydra:job.num}"
    if not folder.is_relative_to(sweep.folder):
        raise UserError(f"job {number} of the sweep would write {folder}, which is not in {sweep.folder}: {remedy}")
    if read_record(folder / RECORD).get("sweep") == sweep.id:
        raise UserError(f"two jobs of the sweep would write {folder}: {remedy}")

    def record(error: str | None) -> None:
        job = {"sweep": sweep.id, "number": number, "overrides": overrides, "error": error}
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
    """Write the table of the sweep's jobs into its folder, and print it.

    Return a line with the number of failed jobs, if any.
    """
    folders = {file.parent: read_record(file) for file in sweep.folder.rglob(RECORD)}
    job_numbers = {folder: record["number"] for folder, record in folders.items() if record.get("sweep") == sweep.id}
    read = [
        read_job(folder, os.path.relpath(folder, sweep.folder))
        for folder in sorted(job_numbers, key=job_numbers.__getitem__)
    ]
    if not read:  # it ended before its first job
        return None
    jobs = join_tasks(read)
    keys = varied_overrides(jobs)
    table = make_table(jobs, keys, main_metrics(jobs))
    report.write_atomically(sweep.folder / "sweep.csv", [as_csv(make_table(jobs, keys, all_metrics(jobs)))])
    report.write_atomically(sweep.folder / "sweep.md", [as_markdown(table)])
    if picture := draw(jobs, keys):
        report.write_atomically(sweep.folder / "sweep.png", picture)
    else:
        (sweep.folder / "sweep.png").unlink(missing_ok=True)  # from an earlier sweep into the same folder
    with reader_may_leave():
        print()
        report.print_columns(table)
        print(f"output: {sweep.folder}")
    track_sweep(sweep.folder, sorted(job_numbers, key=job_numbers.__getitem__))
    if num_failed := sum(job.error is not None for job in read):
        return f"{num_failed} of {len(read)} jobs failed: see {sweep.folder / 'sweep.md'}"
    return None
