"""The choice of a sweep's best job by `sweep.select`, and the Pareto front."""

from dataclasses import dataclass, replace
from pathlib import Path

from conf.errors import UserError
from conf.selection import Limit, Selection, full_name, unmeasured
from pipelines.jobs import report
from pipelines.tasks.sweep_jobs import CI95, STDERR, SweepJob, read_job

CONFIG = "config.yaml"
BEST = "best"


@dataclass(frozen=True)
class Choice:
    selection: Selection
    chosen: int | None
    """The row; None if no job satisfies the constraints."""
    front: frozenset[int]
    """The Pareto front: rows than which no row is better in a metric of the selection and worse in none."""

    def mark(self, row: int) -> str:
        return "chosen" if row == self.chosen else "front" if row in self.front else ""


def choose(jobs: list[SweepJob], selection: Selection) -> Choice:
    """Return the chosen row and the Pareto front.

    The chosen row is the row with the best objective of all rows that satisfy the constraints, and the first of equal
    rows. A job that sweep.halving stopped is in neither. Raises UserError for a metric that no job has.
    """
    selection = _resolved(selection, jobs)
    complete = {i: job for i, job in enumerate(jobs) if not job.error and not job.is_stopped}
    values = {i: v for i, job in complete.items() if (v := _to_minimize(job, selection)) is not None}
    allowed = [i for i in values if _satisfies(jobs[i], selection)]
    chosen = min(allowed, key=lambda i: values[i][0], default=None)
    front = frozenset(i for i, v in values.items() if not any(_dominates(other, v) for other in values.values()))
    return Choice(selection, chosen, front)


def why_none(jobs: list[SweepJob], keys: list[str], selection: Selection) -> str:
    """Return an error line: the job that is closest to the constraints, and by how much it misses them."""
    metrics = [selection.objective, *(limit.metric for limit in selection.limits)]
    finished = [job for job in jobs if not job.error and not job.is_stopped]
    complete = [job for job in finished if all(job.number(metric) is not None for metric in metrics)]
    if not complete:
        return f"no job measured all of {', '.join(dict.fromkeys(metrics))}, which sweep.select needs"
    (_, end, limit), job = min(((_worst_miss(job, selection), job) for job in complete), key=lambda miss: miss[0][0])
    is_end = job.number(limit.metric) != end
    at = f" at the {'upper' if limit.is_upper else 'lower'} end of its interval" if is_end else ""
    return (
        f"no job satisfies sweep.select: closest is {job.label(keys)}, whose {limit.metric} is {end:.6g}{at}, "
        f"{abs(end - limit.bound):.4g} from the bound of {limit.text}"
    )


def write_best(folder: Path, job: SweepJob, objective: str) -> Path:
    """Write `best/config.yaml`, which `--config-path` runs. For a row of several tasks, it is the objective's task.

    Raises UserError if the job has no config.yaml.
    """
    sources = [source for source in job.folders if read_job(source, "").number(objective) is not None]
    source = next((file for file in (f / CONFIG for f in (*sources, *job.folders)) if file.is_file()), None)
    if source is None:
        raise UserError(f"job {job.name} was chosen, but its {CONFIG} is gone: run the sweep again")
    best = folder / BEST
    best.mkdir(exist_ok=True)
    config = source.read_text(encoding="utf-8").replace(str(source.parent), str(best), 1)  # in its first line
    report.write_atomically(best / CONFIG, [config])
    return best


def remove_best(folder: Path) -> None:
    """Remove the choice of an earlier sweep into the same folder."""
    (folder / BEST / CONFIG).unlink(missing_ok=True)
    if (folder / BEST).is_dir() and not any((folder / BEST).iterdir()):
        (folder / BEST).rmdir()


def _resolved(selection: Selection, jobs: list[SweepJob]) -> Selection:
    """Return the selection with the metric names of the jobs, such as peak_memory_bytes for peak_memory."""
    names = dict.fromkeys(name for job in jobs for name in job.metrics if job.number(name) is not None)
    names = {name: None for name in names if not name.endswith((STDERR, f"{CI95}_low", f"{CI95}_high"))}

    def resolve(metric: str) -> str:
        name = full_name(metric, names)
        if name is None and names:
            raise unmeasured(metric, names)
        return name or metric

    limits = tuple(replace(limit, metric=resolve(limit.metric)) for limit in selection.limits)
    return Selection(limits, selection.is_max, resolve(selection.objective))


def _satisfies(job: SweepJob, selection: Selection) -> bool:
    """Whether the unfavourable ends of the job's intervals satisfy all constraints."""
    ends = ((limit, job.end(limit.metric, limit.is_upper)) for limit in selection.limits)
    return all(end is not None and limit.holds(end) for limit, end in ends)


def _to_minimize(job: SweepJob, selection: Selection) -> tuple[float, ...] | None:
    """Return the objective and the constrained metrics, with signs such that less is better; None if one is missing."""
    signs = {selection.objective: -1 if selection.is_max else 1}
    for limit in selection.limits:
        signs.setdefault(limit.metric, 1 if limit.is_upper else -1)
    values = [sign * number for metric, sign in signs.items() if (number := job.number(metric)) is not None]
    return tuple(values) if len(values) == len(signs) else None


def _dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _worst_miss(job: SweepJob, selection: Selection) -> tuple[float, float, Limit]:
    """Return the constraint that is missed by the largest share of its bound: share, end of the interval, constraint."""
    ends = [(limit, end) for limit in selection.limits if (end := job.end(limit.metric, limit.is_upper)) is not None]
    return max(
        ((0.0 if limit.holds(end) else abs(end - limit.bound) / (abs(limit.bound) or 1.0), end, limit)
         for limit, end in ends),
        key=lambda miss: miss[0],
    )  # fmt: skip
