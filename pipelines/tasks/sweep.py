"""A sweep: the record of each job, and finally a table and a picture of all jobs.

A job is read only from the files in its folder, whichever process ran it: `job.json` (its sweep, number, overrides and
error) and `metrics.json`. Jobs whose overrides differ only in the task, as in `-m task=bench,evaluate quant=none,int8`,
share a row, so that speed and quality of a choice can be compared.
"""

import csv
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError, list_known_names
from conf.support.signals import reader_may_leave
from conf.support.terminal import escape_control_chars
from pipelines.jobs import report

Value = str | int | float | None
Table = dict[str, list[str]]
"""Cells by heading."""
RECORD = "job.json"

# Metrics in the printed table, sweep.md and the picture, if a job has them. sweep.csv has all metrics.
MAIN = {  # metric: name, unit, factor
    "accuracy": ("accuracy", "%", 100),
    "perplexity": ("perplexity", "", 1),
    "kl_mean": ("KL divergence", "", 1),
    "prefill_tokens_per_s": ("prefill", "tokens/s", 1),
    "decode_tokens_per_s": ("decode", "tokens/s", 1),
    "tokens_per_s": ("speed", "tokens/s", 1),
    "acceptance": ("drafts accepted", "%", 100),
    "time_to_first_token_s.p50": ("first token p50", "ms", 1e3),
    "time_per_output_token_s.p50": ("next token p50", "ms", 1e3),
    "weight_bytes": ("weights", "MB", 1e-6),
    "peak_memory_bytes": ("peak memory", "MB", 1e-6),
    "decode_share_of_bandwidth": ("share of bandwidth", "%", 100),
    "num_errors": ("rows with errors", "", 1),
}
PER_TASK = "tasks."  # metrics of lm_eval: all are shown, unscaled
PEAK_MEMORY = "peak_memory_bytes"
# The picture plots the first SPEED metric that the jobs have over the first two OVER metrics that they have, and the
# first QUALITY metric over the weight bytes.
SPEED = ("decode_tokens_per_s", "tokens_per_s", "prefill_tokens_per_s")
OVER = (PEAK_MEMORY, "accuracy", "perplexity")
QUALITY = ("perplexity", "accuracy")
TASK = "task"
LABEL = 60  # maximum characters of a job's label in the picture


@dataclass(frozen=True)
class SweepJob:
    """A row of the table. `metrics` are flat: a percentile is `time_to_first_token_s.p50`."""

    name: str
    overrides: dict[str, str]
    metrics: dict[str, Value]
    error: str | None


@dataclass(frozen=True)
class Sweep:
    id: str
    """Identifies the jobs, because the folder may contain jobs of an earlier sweep."""
    dir: str

    @property
    def folder(self) -> Path:
        return Path(os.path.abspath(self.dir))


@contextmanager
def recorded_job(sweep: Sweep, folder: Path, number: int, overrides: list[str]) -> Iterator[None]:
    """Write `job.json` into the folder. An error in the block ends only this job; an interrupt ends the sweep.

    Raises UserError for a folder outside the sweep's folder, and for a folder that another job of the sweep uses.
    """
    remedy = "give hydra.sweep.subdir=${hydra:job.num}"
    if not folder.is_relative_to(sweep.folder):
        raise UserError(f"job {number} of the sweep would write {folder}, which is not in {sweep.folder}: {remedy}")
    if _record(folder / RECORD).get("sweep") == sweep.id:
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
    if names is None or (job := _read_job(folder, "")).error:
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
    folders = {file.parent: _record(file) for file in sweep.folder.rglob(RECORD)}
    job_numbers = {folder: record["number"] for folder, record in folders.items() if record.get("sweep") == sweep.id}
    read = [
        _read_job(folder, os.path.relpath(folder, sweep.folder))
        for folder in sorted(job_numbers, key=job_numbers.__getitem__)
    ]
    if not read:  # it ended before its first job
        return None
    jobs = _joined(read)
    keys = _varied(jobs)
    table = _table(jobs, keys, _main_metrics(jobs))
    report.write_atomically(sweep.folder / "sweep.csv", [_csv(_table(jobs, keys, _all_metrics(jobs)))])
    report.write_atomically(sweep.folder / "sweep.md", [_markdown(table)])
    if picture := _picture(jobs, keys):
        report.write_atomically(sweep.folder / "sweep.png", picture)
    else:
        (sweep.folder / "sweep.png").unlink(missing_ok=True)  # from an earlier sweep into the same folder
    with reader_may_leave():
        print()
        report.print_columns(table)
        print(f"output: {sweep.folder}")
    if num_failed := sum(job.error is not None for job in read):
        return f"{num_failed} of {len(read)} jobs failed: see {sweep.folder / 'sweep.md'}"
    return None


def _record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _read_job(folder: Path, name: str) -> SweepJob:
    job = _record(folder / RECORD)
    pairs = [override.partition("=") for override in job["overrides"]]
    metrics: dict[str, Value] = {}
    # The folder of a failed job may contain the metrics of an earlier sweep.
    if job["error"] is None and (file := folder / "metrics.json").exists():
        metrics = dict(_flat(json.loads(file.read_text(encoding="utf-8"))))
    error = job["error"] and _writable(job["error"])
    return SweepJob(name, {key: _writable(_unquoted(value)) for key, _, value in pairs}, metrics, error)


def _joined(jobs: list[SweepJob]) -> list[SweepJob]:
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
    return SweepJob(name, group[0].overrides | {TASK: tasks}, metrics, "; ".join(errors) or None)


def _flat(metrics: dict[str, object], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in metrics.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
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


def _varied(jobs: list[SweepJob]) -> list[str]:
    """Return the overrides that differ between jobs; all overrides if none differs, as in a sweep of one job."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    return [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1] or keys


def _table(jobs: list[SweepJob], keys: list[str], metrics: Table) -> Table:
    table = {"job": [job.name for job in jobs]} | {key: [job.overrides.get(key, "") for job in jobs] for key in keys}
    errors = {"error": [job.error or "" for job in jobs]} if any(job.error for job in jobs) else {}
    return table | metrics | errors


def _all_metrics(jobs: list[SweepJob]) -> Table:
    names = dict.fromkeys(name for job in jobs for name in job.metrics)
    return {name: ["" if (v := job.metrics.get(name)) is None else str(v) for job in jobs] for name in names}


def _main_metrics(jobs: list[SweepJob]) -> Table:
    """Return the main metrics, rounded for people.

    Values have three significant digits, or all digits before the point. Perplexity has five, because schemes differ in
    its third digit.
    """

    def shown(job: SweepJob, metric: str) -> str:
        value = _scaled(job, metric)
        if value is None:
            return "-"
        if metric == "perplexity":
            return f"{value:#.5g}"
        return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 99.95 else f"{value:#.3g}"

    per_task = dict.fromkeys(name for job in jobs for name in job.metrics if name.startswith(PER_TASK))
    return {
        _heading(metric): [shown(job, metric) for job in jobs]
        for metric in (*per_task, *MAIN)
        if any(_scaled(job, metric) is not None for job in jobs)
    }


def _heading(metric: str) -> str:
    if metric.startswith(PER_TASK):
        return metric.removeprefix(PER_TASK)
    name, unit, _ = MAIN[metric]
    return f"{name} ({unit})" if unit else name


def _scaled(job: SweepJob, metric: str) -> float | None:
    value = job.metrics.get(metric)
    factor = 1 if metric.startswith(PER_TASK) else MAIN[metric][2]
    return value * factor if isinstance(value, int | float) else None


def _csv(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.keys(), *zip(*table.values(), strict=True)])
    return text.getvalue()


def _markdown(table: Table) -> str:
    def line(cells: Iterable[str]) -> str:
        escaped = (re.sub(r"([\\|<*`])", r"\\\1", cell) for cell in cells)
        return f"| {' | '.join('<br>'.join(cell.splitlines()) for cell in escaped)} |\n"

    rows = zip(*table.values(), strict=True)
    return "".join([line(table), line("---" for _ in table), *map(line, rows)])


def _picture(jobs: list[SweepJob], keys: list[str]) -> bytes | None:
    """Return a PNG: quality over weight bytes, speed over memory, and speed over quality if both were measured.

    None if no job has both values of a point.
    """
    from matplotlib.figure import Figure  # here, because a sweep's jobs do not need it

    quality = [("weight_bytes", y) for y in QUALITY if any(_point(job, "weight_bytes", y) for job in jobs)][:1]
    speed = [(x, y) for y in SPEED for x in OVER if any(_point(job, x, y) for job in jobs)]
    panels = quality + [(x, y) for x, y in speed if y == speed[0][1]][:2]
    if not panels:
        return None
    labels = [_label(i, job, keys) for i, job in enumerate(jobs)]
    size = 5 * len(panels) + 0.09 * max(map(len, labels)), max(4, 0.25 * len(jobs))
    figure = Figure(figsize=size, layout="constrained")
    handles = {}
    for (x, y), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        for i, job in enumerate(jobs):
            if point := _point(job, x, y):
                handles[labels[i]] = axes.scatter(*point, s=220, color=f"C{i % 10}", alpha=0.8, linewidths=0)
                axes.annotate(str(i), point, ha="center", va="center", color="white", weight="bold", size=9)
        axes.set(xlabel=_heading(x), ylabel=_heading(y))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.margins(0.12)
        axes.grid(alpha=0.3)
    legend = figure.legend(handles.values(), handles, loc="outside right upper", frameon=False, markerscale=0.6)
    for text in legend.get_texts():
        text.set_parse_math(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _point(job: SweepJob, x: str, y: str) -> tuple[float, float] | None:
    values = _scaled(job, x), _scaled(job, y)
    return None if values[0] is None or values[1] is None else (values[0], values[1])


def _label(i: int, job: SweepJob, keys: list[str]) -> str:
    """Return a job's label: one line of at most LABEL characters that the picture's font has."""
    from matplotlib.font_manager import findfont, get_font

    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    line = f"{i}  " + " ".join(f"{key}={job.overrides.get(key, '')}" for key in keys)
    line = line if len(line) <= LABEL else line[: LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return "".join(c if ord(c) in glyphs else "\N{WHITE SQUARE}" for c in line)
