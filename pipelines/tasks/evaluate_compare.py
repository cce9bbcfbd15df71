"""Compare an evaluate run with an earlier one on the same data, sample by sample, and check the bounds of a gate."""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import Difference, UserError
from pipelines.jobs.uncertainty import MIN_WINDOWS, Interval, PairedDifference, accuracy_difference, ratio_difference
from pipelines.tasks.evaluate_samples import DOCUMENT, QUESTION, WINDOW, Key, Sample

COMPARISON, PICTURE = "comparison.json", "comparison.png"
NUM_CHANGED = 20  # samples
RATIO = "perplexity_ratio"


@dataclass(frozen=True)
class Compared:
    """A metric of two runs on the same samples."""

    before: float
    now: float
    difference: PairedDifference
    """now - before, and for `perplexity_ratio` the quotient. Infinity is a quotient beyond the largest float."""


@dataclass(frozen=True)
class Comparison:
    metrics: dict[str, Compared]
    changed: list[dict[str, Any]]
    """The samples that changed most: kind, id, change, and both samples as `before` and `now`."""

    def as_json(self) -> bytes:
        """Return comparison.json, with null for infinity."""
        metrics = {
            name: {
                "before": _finite(compared.before),
                "now": _finite(compared.now),
                "difference": _finite(compared.difference.value),
                "ci95": compared.difference.interval and [_finite(end) for end in compared.difference.interval],
                "p": compared.difference.p,
            }
            for name, compared in self.metrics.items()
        }
        text = json.dumps({"metrics": metrics, "changed": self.changed}, indent=2, ensure_ascii=False) + "\n"
        return text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes its JSON escape


def compare(now: Mapping[Key, Sample], before: Mapping[Key, Sample], seed: int) -> Comparison:
    """Compare the samples of two runs on the same data."""
    metrics = _of_windows(now, before, seed)
    questions = [key for key in now if key[0] == QUESTION]
    if questions:
        metrics["accuracy"] = _of_right(*([bool(run[key]["score"]) for key in questions] for run in (now, before)))
    for task in dict.fromkeys(sample["task"] for sample in now.values() if sample["kind"] == DOCUMENT):
        metrics |= _of_task(task, now, before, seed)
    changes: list[dict[str, Any]] = [
        {"kind": key[0], "id": key[1], "change": change, "before": before[key], "now": sample}
        for key, sample in now.items()
        if (change := _change(sample, before[key]))
    ]
    changes.sort(key=lambda changed: -abs(changed["change"]))
    return Comparison(metrics, changes[:NUM_CHANGED])


def check_gate_windows(gate: Mapping[str, float], num_windows: int) -> None:
    """Raise UserError if the text has too few windows for the intervals that the gate needs."""
    if num_windows < MIN_WINDOWS:
        for name in gate.keys() & {RATIO, "kl_mean"}:
            problem = f"evaluate.gate.{name} needs an interval of at least {MIN_WINDOWS} windows"
            raise UserError(f"{problem}, but evaluate.data has {num_windows}: give more text, or a smaller window")


def check_gate(gate: Mapping[str, float], metrics: Mapping[str, Any], comparison: Comparison | None) -> None:
    """Raise Difference if the unfavourable end of a metric's interval passes its bound. Its line names each such metric.

    Every bound has an interval: `check_gate_windows` refuses a text that is too short, and the config a bound whose
    metric is not measured.
    """
    failures = []
    for name, bound in gate.items():
        if name == "kl_mean":
            value, interval = metrics["kl_mean"], metrics["kl_mean_ci95"]
        else:
            assert comparison is not None  # the config demands evaluate.against
            value, interval = comparison.metrics[name].difference[:2]
        low, high = interval
        if name == "accuracy" and low < bound:
            failures.append(
                f"{name} is {value:+.5g}, and the low end {low:+.5g} of its 95 % interval is below {bound:g}"
            )
        elif name != "accuracy" and high > bound:
            failures.append(
                f"{name} is {value:.5g}, and the high end {high:.5g} of its 95 % interval is above {bound:g}"
            )
    if failures:
        raise Difference(f"the gate is not passed: {'; '.join(failures)}")


def comparison_table(comparison: Comparison) -> dict[str, list[str]]:
    """Return the columns of the printed table."""
    rows = comparison.metrics.items()
    signs = ["" if name == RATIO else "+" for name, _ in rows]
    differences = [compared.difference for _, compared in rows]
    return {
        "metric": [name for name, _ in rows],
        "before": [f"{compared.before:.5g}" for _, compared in rows],
        "now": [f"{compared.now:.5g}" for _, compared in rows],
        "difference": [f"{d.value:{sign}.5g}" for d, sign in zip(differences, signs, strict=True)],
        "95 % interval": [_shown(d.interval, sign) for d, sign in zip(differences, signs, strict=True)],
        "p": ["-" if d.p is None else f"{d.p:.2g}" for d in differences],
    }


def _shown(interval: Interval | None, sign: str) -> str:
    return "-" if interval is None else f"{interval[0]:{sign}.5g} to {interval[1]:{sign}.5g}"


def changed_table(comparison: Comparison) -> dict[str, list[str]]:
    """Return the columns of the printed table of the samples that changed most."""
    return {
        "changed most": [f"{changed['kind']} {changed['id']}" for changed in comparison.changed],
        "by": [f"{changed['change']:+.4g}" for changed in comparison.changed],
    }


def draw_comparison(now: Mapping[Key, Sample], before: Mapping[Key, Sample]) -> bytes | None:
    """Return a PNG: the windows' log likelihoods against the baseline's, and how many answers changed. None without."""
    from matplotlib.figure import Figure  # here, because other tasks do not need it

    windows = [key for key in now if key[0] == WINDOW]
    answers = [key for key in now if key[0] == QUESTION]
    if not windows and not answers:
        return None
    figure = Figure(figsize=(5.0 * (bool(windows) + bool(answers)), 4.2), layout="constrained")
    panels = iter(figure.subplots(1, bool(windows) + bool(answers), squeeze=False)[0])
    if windows:
        axes = next(panels)
        x, y = ([_nll_per_token(run[key]) for key in windows] for run in (before, now))
        axes.scatter(x, y, s=14, alpha=0.7)
        axes.axline((min(x), min(x)), slope=1, color="grey", linewidth=1)
        axes.set(xlabel="evaluate.against: nats per token of a window", ylabel="this run: nats per token of a window")
    if answers:
        axes = next(panels)
        kinds = {"both right": (1, 1), "only against": (1, 0), "only this run": (0, 1), "both wrong": (0, 0)}
        pairs = [(before[key]["score"], now[key]["score"]) for key in answers]
        axes.bar_label(axes.bar([*kinds], [pairs.count(kind) for kind in kinds.values()]))
        axes.set(ylabel="questions")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _of_windows(now: Mapping[Key, Sample], before: Mapping[Key, Sample], seed: int) -> dict[str, Compared]:
    """Return the metrics of the windows, without metrics of a reference if only one of the runs has a reference."""
    keys = [key for key in now if key[0] == WINDOW]
    counts = [now[key]["num_tokens"] for key in keys]
    metrics = {}
    for name, field in (("nll_per_token", "nll"), ("kl_mean", "kl"), ("top1_agreement", "num_agreed")):
        if keys and all(run[key].get(field) is not None for key in keys for run in (now, before)):
            sums, other_sums = ([float(run[key][field]) for key in keys] for run in (now, before))
            difference = ratio_difference(sums, other_sums, counts, seed)
            metrics[name] = Compared(_ratio(other_sums, counts), _ratio(sums, counts), difference)
    if nll := metrics.get("nll_per_token"):
        value, interval, p = nll.difference
        interval = interval and (_exp(interval[0]), _exp(interval[1]))
        metrics[RATIO] = Compared(_exp(nll.before), _exp(nll.now), PairedDifference(_exp(value), interval, p))
    return metrics


def _of_right(right: list[bool], other_right: list[bool]) -> Compared:
    num_samples = len(right)
    difference = accuracy_difference(right, other_right)
    return Compared(sum(other_right) / num_samples, sum(right) / num_samples, difference)


def _of_task(task: str, now: Mapping[Key, Sample], before: Mapping[Key, Sample], seed: int) -> dict[str, Compared]:
    """Return the metrics of an lm_eval task that have a number for each document, by the names of metrics.json."""
    by_filter: dict[str, list[Key]] = {}
    for key, sample in now.items():
        if key[0] == DOCUMENT and sample["task"] == task:
            by_filter.setdefault(sample["filter"], []).append(key)
    names = [(metric, name) for name, keys in by_filter.items() for metric in now[keys[0]]["metrics"]]
    metrics = {}
    for metric, name in names:
        filters = sum(other == metric for other, _ in names)
        pairs = [(now[key]["metrics"].get(metric), before[key]["metrics"].get(metric)) for key in by_filter[name]]
        if any(None in pair for pair in pairs):
            continue
        values, other_values = ([pair[i] for pair in pairs] for i in range(2))
        if {*values, *other_values} <= {0, 1}:
            compared = _of_right(*([value == 1 for value in run] for run in (values, other_values)))
        else:
            counts = [1] * len(values)
            difference = ratio_difference(values, other_values, counts, seed)
            compared = Compared(_ratio(other_values, counts), _ratio(values, counts), difference)
        metrics[f"tasks.{task}.{metric}" + (f".{name}" if filters > 1 else "")] = compared
    return metrics


def _change(sample: Sample, before: Sample) -> float:
    """Return the difference of nats per token, of right answers, or of the document's first metric."""
    if sample["kind"] == WINDOW:
        return _nll_per_token(sample) - _nll_per_token(before)
    if sample["kind"] == QUESTION:
        return float(sample["score"] - before["score"])
    pairs = ((value, before["metrics"].get(name)) for name, value in sample["metrics"].items())
    return next((float(value - other) for value, other in pairs if other is not None), 0.0)


def _nll_per_token(window: Sample) -> float:
    return float(window["nll"] / window["num_tokens"])


def _ratio(sums: list[float], counts: list[int]) -> float:
    return math.fsum(sums) / sum(counts)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
