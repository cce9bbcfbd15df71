"""The picture of a sweep: quality over weight bytes, and speed over memory and quality."""

import io
from typing import Any

from pipelines.tasks.sweep_choice import Choice
from pipelines.tasks.sweep_jobs import CI95, PEAK_MEMORY, SweepJob
from pipelines.tasks.sweep_table import heading, scaled

# The picture plots the first SPEED metric that the jobs have over the first two OVER metrics that they have, and the
# first QUALITY metric over the weight bytes.
SPEED = ("decode_tokens_per_s", "tokens_per_s", "prefill_tokens_per_s")
OVER = (PEAK_MEMORY, "accuracy", "perplexity")
QUALITY = ("perplexity", "accuracy")
RING: dict[str, Any] = {"edgecolors": "black", "linewidths": 2}
LABEL = 60  # maximum characters of a job's label in the picture


def draw(jobs: list[SweepJob], keys: list[str], choice: Choice | None) -> bytes | None:
    """Return a PNG: quality over weight bytes, speed over memory, and speed over quality if both were measured.

    With a choice, the first panel is its objective over its first constrained metric. Bars are 95 % intervals. Jobs of
    the Pareto front have a ring, the chosen job a star. None if no job has both values of a point.
    """
    from matplotlib.figure import Figure  # here, because a sweep's jobs do not need it

    quality = [("weight_bytes", y) for y in QUALITY if any(_point(job, "weight_bytes", y) for job in jobs)][:1]
    speed = [(x, y) for y in SPEED for x in OVER if any(_point(job, x, y) for job in jobs)]
    panels = _panel_of(choice) + quality + [(x, y) for x, y in speed if y == speed[0][1]][:2]
    panels = [panel for panel in dict.fromkeys(panels) if any(_point(job, *panel) for job in jobs)]
    if not panels:
        return None
    labels = [_label(i, job, keys, choice.mark(i) if choice else "") for i, job in enumerate(jobs)]
    size = 5 * len(panels) + 0.09 * max(map(len, labels)), max(4, 0.25 * len(jobs))
    figure = Figure(figsize=size, layout="constrained")
    handles = {}
    for (x, y), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        for i, job in enumerate(jobs):
            if point := _point(job, x, y):
                mark = choice.mark(i) if choice else ""
                axes.errorbar(*point, xerr=_bars(job, x), yerr=_bars(job, y), fmt="none", color=f"C{i % 10}", capsize=3)
                style = dict(RING if mark else {"linewidths": 0}, marker="*" if mark == "chosen" else "o")
                size_of_mark = 700 if mark == "chosen" else 220
                handles[labels[i]] = axes.scatter(*point, s=size_of_mark, color=f"C{i % 10}", alpha=0.8, **style)
                axes.annotate(str(i), point, ha="center", va="center", color="white", weight="bold", size=9)
        axes.set(xlabel=heading(x), ylabel=heading(y))
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
    values = scaled(job, x), scaled(job, y)
    return None if values[0] is None or values[1] is None else (values[0], values[1])


def _panel_of(choice: Choice | None) -> list[tuple[str, str]]:
    limits = choice.selection.limits if choice else ()
    return [(limits[0].metric, choice.selection.objective)] if choice and limits else []


def _bars(job: SweepJob, metric: str) -> list[list[float]] | None:
    """Return the lengths [2, 1] from a value to the ends of its 95 % interval; None without an interval."""
    value, low, high = scaled(job, metric), scaled(job, metric, f"{CI95}_low"), scaled(job, metric, f"{CI95}_high")
    if value is None or low is None or high is None:
        return None
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def _label(i: int, job: SweepJob, keys: list[str], mark: str) -> str:
    """Return a job's label: one line of at most LABEL characters that the picture's font has."""
    from matplotlib.font_manager import findfont, get_font

    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    line = f"{i}  " + " ".join(f"{key}={job.overrides.get(key, '')}" for key in keys)
    line = f"{i}  {mark}:{line.removeprefix(str(i))}" if mark else line
    line = line if len(line) <= LABEL else line[: LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return "".join(c if ord(c) in glyphs else "\N{WHITE SQUARE}" for c in line)
