"""The table of a sweep: its columns, and its forms as CSV and Markdown."""

import csv
import io
import re
from collections.abc import Iterable

from pipelines.tasks.sweep_jobs import PEAK_MEMORY, SweepJob

Table = dict[str, list[str]]
"""Cells by heading."""
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
    PEAK_MEMORY: ("peak memory", "MB", 1e-6),
    "decode_share_of_bandwidth": ("share of bandwidth", "%", 100),
    "num_errors": ("rows with errors", "", 1),
}
PER_TASK = "tasks."  # metrics of lm_eval: all are shown, unscaled


def varied_overrides(jobs: list[SweepJob]) -> list[str]:
    """Return the overrides that differ between jobs; all overrides if none differs, as in a sweep of one job."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    return [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1] or keys


def make_table(jobs: list[SweepJob], keys: list[str], metrics: Table) -> Table:
    table = {"job": [job.name for job in jobs]} | {key: [job.overrides.get(key, "") for job in jobs] for key in keys}
    errors = {"error": [job.error or "" for job in jobs]} if any(job.error for job in jobs) else {}
    return table | metrics | errors


def all_metrics(jobs: list[SweepJob]) -> Table:
    names = dict.fromkeys(name for job in jobs for name in job.metrics)
    return {name: ["" if (v := job.metrics.get(name)) is None else str(v) for job in jobs] for name in names}


def main_metrics(jobs: list[SweepJob]) -> Table:
    """Return the main metrics, rounded for people.

    Values have three significant digits, or all digits before the point. Perplexity has five, because schemes differ in
    its third digit.
    """

    def shown(job: SweepJob, metric: str) -> str:
        value = scaled(job, metric)
        if value is None:
            return "-"
        if metric == "perplexity":
            return f"{value:#.5g}"
        return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 99.95 else f"{value:#.3g}"

    names = dict.fromkeys(name for job in jobs for name in job.metrics)
    per_task = [name for name in names if name.startswith(PER_TASK) and not name.endswith("_stderr")]
    return {
        heading(metric): [shown(job, metric) for job in jobs]
        for metric in (*per_task, *MAIN)
        if any(scaled(job, metric) is not None for job in jobs)
    }


def heading(metric: str) -> str:
    if metric.startswith(PER_TASK):
        return metric.removeprefix(PER_TASK)
    name, unit, _ = MAIN[metric]
    return f"{name} ({unit})" if unit else name


def scaled(job: SweepJob, metric: str) -> float | None:
    value = job.metrics.get(metric)
    factor = 1 if metric.startswith(PER_TASK) else MAIN[metric][2]
    return value * factor if isinstance(value, int | float) else None


def as_csv(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.keys(), *zip(*table.values(), strict=True)])
    return text.getvalue()


def as_markdown(table: Table) -> str:
    def line(cells: Iterable[str]) -> str:
        escaped = (re.sub(r"([\\|<*`])", r"\\\1", cell) for cell in cells)
        return f"| {' | '.join('<br>'.join(cell.splitlines()) for cell in escaped)} |\n"

    rows = zip(*table.values(), strict=True)
    return "".join([line(table), line("---" for _ in table), *map(line, rows)])
