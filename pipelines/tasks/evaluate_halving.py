"""`sweep.halving`: a job scores growing parts of its windows, and stops when it can no longer be the best of its sweep.

It is successive halving (arXiv 1502.07943) with the rule of a race (Maron and Moore, Advances in Neural Information
Processing Systems 6, 1994): a job stops by its interval, and not by its rank, so jobs need not run at once.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from conf.errors import UserError
from conf.selection import Selection, parse_selection
from pipelines.engine import Engine
from pipelines.jobs.scoring import Scores, Window, WindowScore, score
from pipelines.jobs.uncertainty import ratio, ratio_difference
from pipelines.tasks.evaluate_samples import WINDOW, Sample, window_samples
from pipelines.tasks.sweep_choice import choose
from pipelines.tasks.sweep_difference import samples_of
from pipelines.tasks.sweep_jobs import RECORD, Sweep, SweepJob, join_tasks, read_jobs, read_record

SHARES = (1 / 8, 1 / 4, 1 / 2, 1)  # of the windows, after which a job may stop
FIELDS = {"nll_per_token": "nll", "perplexity": "nll", "kl_mean": "kl", "top1_agreement": "num_agreed"}
"""The field of a window's sample from which a metric comes."""


@dataclass(frozen=True)
class Race:
    """Decides whether a job of a sweep stops."""

    sweep: Sweep
    selection: Selection
    """By which the sweep chooses a job at its end."""
    seed: int
    """Of the order of the windows, and of the intervals."""

    def is_lost(self, samples: list[Sample]) -> bool:
        """Whether these windows show that the job is not the best one.

        Either the interval of a metric is wholly beyond a bound of `sweep.select`, or the job's paired difference from
        the best finished job is wholly worse, by the objective. Fewer than six windows have no interval.
        """
        counts = [sample["num_tokens"] for sample in samples]
        for limit in self.selection.limits:
            if values := _values(samples, limit.metric):
                function = np.exp if _metric(limit.metric) == "perplexity" else np.asarray
                spread = ratio(values, counts, self.seed, function)
                interval = spread and spread.interval
                if interval and not limit.holds(interval[0 if limit.is_upper else 1]):
                    return True
        best, objective = self._best(), self.selection.objective
        if best is None or not (values := _values(samples, objective)):
            return False
        by_key = samples_of(best)
        rivals = [by_key.get((WINDOW, sample["id"]), {}) for sample in samples]
        other_values = _values(rivals, objective)
        if [rival.get("input") for rival in rivals] != [sample["input"] for sample in samples] or not other_values:
            return False  # the best job measured other data
        if self.selection.is_max:
            values, other_values = other_values, values
        interval = ratio_difference(values, other_values, counts, self.seed).interval
        return interval is not None and interval[0] > 0

    def _best(self) -> SweepJob | None:
        rows = [row for row in join_tasks(read_jobs(self.sweep)[0]) if not row.error and row.share_of_windows == 1]
        try:
            chosen = choose(rows, self.selection).chosen if rows else None
        except UserError:  # no job has measured a metric of the selection yet
            return None
        return None if chosen is None else rows[chosen]


def open_race(output_dir: Path, has_reference: bool, seed: int) -> Race:
    """Return the race of the sweep's job in this folder. Without sweep.select the best job has the least KL divergence,
    or the least perplexity if there is no reference."""
    record = read_record(output_dir / RECORD)
    least = Selection((), False, "kl_mean" if has_reference else "perplexity")
    selection = parse_selection(record["select"]) if record["select"] else least
    return Race(Sweep(record["sweep"], record["dir"]), selection, seed)


def score_in_parts(
    engine: Engine,
    windows: list[Window],
    inputs: dict[str, str],
    reference: Engine | None,
    on_step: Callable[[int], None],
    race: Race,
) -> tuple[Scores, dict[str, str]]:
    """Score parts of the windows until the race is lost. Return the scores and the inputs of the scored windows.

    inputs: digests by id, as of `window_inputs`, in the order of the windows. A part is drawn from all windows.
    """
    ids, order = list(inputs), random.Random(race.seed).sample(range(len(windows)), len(windows))
    scores: dict[int, WindowScore] = {}
    for end in sorted({math.ceil(share * len(windows)) for share in SHARES}):
        part, done = sorted(order[len(scores) : end]), sum(window.num_tokens for window in scores.values())
        result = score(engine, [windows[i] for i in part], reference, partial(_report, on_step, done))
        scores |= dict(zip(part, result.windows, strict=True))
        scored = {ids[i]: inputs[ids[i]] for i in sorted(scores)}
        all_scores = Scores([scores[i] for i in sorted(scores)])
        if end == len(windows) or race.is_lost(window_samples(scored, all_scores)):
            return all_scores, scored
    raise AssertionError("the last share is 1")


def _report(on_step: Callable[[int], None], num_before: int, num_tokens: int) -> None:
    on_step(num_before + num_tokens)


def _metric(name: str) -> str:
    return name.removeprefix("evaluate.")


def _values(samples: list[Sample], metric: str) -> list[float]:
    """Return the sums of a metric's field; none for a metric that does not come from windows."""
    field = FIELDS.get(_metric(metric))
    values = [sample.get(field) for sample in samples] if field else []
    return [float(value) for value in values if value is not None]
