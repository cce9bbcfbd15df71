"""The table of a sweep: its columns, and its forms as CSV and Markdown."""

import csv
import io
import math
import re
from collections.abc import Iterable

from pipelines.jobs.uncertainty import PairedDifference
from pipelines.tasks.sweep_choice import Choice
from pipelines.tasks.sweep_difference import Differences
from pipelines.tasks.sweep_jobs import CI95, PEAK_MEMORY, SHARE, STDERR, SweepJob

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
    SHARE: ("windows scored", "%", 100),
    "decode_share_of_bandwidth": ("share of bandwidth", "%", 100),
    "num_errors": ("rows with errors", "", 1),
}
SMALL = 1e-4  # smaller values are shown as 1.2e-05
PER_TASK = "tasks."  # metrics of lm_eval: all are shown, unscaled
DIFFERENCES = {  # from the baseline: heading, factor
    "accuracy_difference": ("accuracy difference (%)", 100),
    "perplexity_ratio": ("perplexity ratio", 1),
    "kl_mean_difference": ("KL difference", 1),
}


def varied_overrides(jobs: list[SweepJob]) -> list[str]:
    """Return the overrides that differ between jobs; all overrides if none differs, as in a sweep of one job."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    return [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1] or keys


def make_table(jobs: list[SweepJob], keys: list[str], choice: Choice | None, metrics: Table) -> Table:
    table = {"job": [job.name for job in jobs]} | {key: [job.overrides.get(key, "") for job in jobs] for key in keys}
    choices = {"choice": [choice.mark(i) for i in range(len(jobs))]} if choice else {}
    errors = {"error": [job.error or "" for job in jobs]} if any(job.error for job in jobs) else {}
    return table | choices | metrics | errors


def all_metrics(jobs: list[SweepJob], differences: list[Differences]) -> Table:
    """Return every metric, and every difference with its interval and p, unrounded."""
    rows = [
        job.metrics | {name + end: value for name, d in by_name.items() for end, value in _numbers(d).items()}
        for job, by_name in zip(jobs, differences, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: ["" if (v := row.get(name)) is None else str(v) for row in rows] for name in names}


def _numbers(difference: PairedDifference) -> dict[str, float | None]:
    low, high = difference.interval or (None, None)
    return {"": difference.value, "_low": low, "_high": high, "_p": difference.p}


def main_metrics(jobs: list[SweepJob], differences: list[Differences]) -> Table:
    """Return the main metrics and the differences, rounded for people."""
    per_task = dict.fromkeys(name for job in jobs for name in job.metrics if name.startswith(PER_TASK))
    per_task = {name: None for name in per_task if not re.search(rf"{STDERR}$|{CI95}(_low|_high)$", name)}
    metrics = {
        heading(metric): [_shown(job, metric) for job in jobs]
        for metric in (*per_task, *MAIN)
        if any(scaled(job, metric) is not None for job in jobs)
    }
    names = dict.fromkeys(name for by_name in differences for name in by_name)
    return metrics | {
        title: [_shown_difference(by_name.get(name), factor) for by_name in differences]
        for name in dict.fromkeys([*DIFFERENCES, *names])
        if name in names
        for title, factor in [DIFFERENCES.get(name, (_of_task(name), 1))]
    }


def _shown(job: SweepJob, metric: str) -> str:
    """Return a value with its standard error, whose first digit is the last digit of both.

    Without an error, values have three significant digits, or all digits before the point. Perplexity has five, because
    schemes differ in its third digit, and with an error at least two decimals.
    """
    value, error = scaled(job, metric), scaled(job, metric, STDERR)
    if value is None:
        return "-"
    if error and math.isfinite(error):
        form = _form(value, error, 2 if metric == "perplexity" else 0)
        return f"{value:{form}} ± {error:{form}}"
    if metric == "perplexity":
        return f"{value:#.5g}"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 99.95 else f"{value:#.3g}"


def _shown_difference(difference: PairedDifference | None, factor: float) -> str:
    if difference is None:
        return "-"
    value, interval = difference.value * factor, difference.interval
    if interval is None or not math.isfinite(value + sum(interval)):
        return f"{value:.3g}"
    low, high = (end * factor for end in interval)
    form = _form(max(map(abs, (value, low, high))), (high - low) / 4)  # about the standard error
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _form(value: float, error: float, least: int = 0) -> str:
    """Return the format of a value and its error, with at least so many decimals.

    It shows the first digit of the error, two digits if the first is 1, but at most six digits of the value.
    """
    if abs(value) < SMALL:
        return ".2g"
    digits = math.floor(math.log10(abs(value)))
    if error <= 0:
        return f",.{max(least, 2 - digits)}f"
    exponent = math.floor(math.log10(error))
    decimals = int(error / 10**exponent < 1.95) - exponent
    return f",.{max(least, min(decimals, 5 - digits))}f"


def heading(metric: str) -> str:
    name, unit, _ = MAIN.get(metric, (_of_task(metric), "", 1))
    return f"{name} ({unit})" if unit else name


def _of_task(metric: str) -> str:
    return metric.removeprefix(PER_TASK).replace("_difference", " difference")


def scaled(job: SweepJob, metric: str, ending: str = "") -> float | None:
    """Return a metric in the unit of its heading; with an ending such as `_stderr`, the number of that name."""
    value = job.number(metric + ending)
    return None if value is None else value * MAIN.get(metric, ("", "", 1))[2]


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
