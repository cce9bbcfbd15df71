"""The picture of a sweep: quality over weight bytes, and speed over memory and quality."""

import io

from pipelines.tasks.sweep_jobs import PEAK_MEMORY, SweepJob
from pipelines.tasks.sweep_table import heading, scaled

# The picture plots the first SPEED metric that the jobs have over the first two OVER metrics that they have, and the
# first QUALITY metric over the weight bytes.
SPEED = ("decode_tokens_per_s", "tokens_per_s", "prefill_tokens_per_s")
OVER = (PEAK_MEMORY, "accuracy", "perplexity")
QUALITY = ("perplexity", "accuracy")
LABEL = 60  # maximum characters of a job's label in the picture


def draw(jobs: list[SweepJob], keys: list[str]) -> bytes | None:
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


def _label(i: int, job: SweepJob, keys: list[str]) -> str:
    """Return a job's label: one line of at most LABEL characters that the picture's font has."""
    from matplotlib.font_manager import findfont, get_font

    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    line = f"{i}  " + " ".join(f"{key}={job.overrides.get(key, '')}" for key in keys)
    line = line if len(line) <= LABEL else line[: LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return "".join(c if ord(c) in glyphs else "\N{WHITE SQUARE}" for c in line)
