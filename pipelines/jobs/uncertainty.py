"""Standard errors and 95 % intervals of quality, and paired differences of two models, by scipy.

W windows, Q questions. Draws of a bootstrap resample whole windows, because tokens of one text depend on each other
(Efron and Tibshirani, An Introduction to the Bootstrap, 1993).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
DRAWS = 10_000
PERCENTILE_DRAWS = 1_000  # each draw adds up the weights of all tokens
DRAWN_AT_ONCE = 2**22  # numbers
# A bootstrap interval is within the least and the largest window. The range of 5 windows contains the median with a
# probability of 94 %, the range of 6 with 97 %. An interval of 95 % therefore needs 6 windows.
MIN_WINDOWS = 6
Interval = tuple[float, float]
Array = NDArray[np.float64]


class Spread(NamedTuple):
    """How far a measured value may be from the value on unlimited data of the same kind."""

    stderr: float
    interval: Interval | None
    """None for too few samples."""


class PairedDifference(NamedTuple):
    value: float
    interval: Interval | None
    p: float | None
    """The two-sided probability of a difference at least this large if the models are equal.

    None, as the interval, for too few samples.
    """


def share(num_right: int, total: int) -> Spread | None:
    """Return the spread of a share of questions, with Wilson's interval. None for fewer than two questions."""
    from scipy.stats import binomtest  # imported in functions: the start of other tasks does not wait for scipy

    if total < 2:
        return None
    interval = binomtest(num_right, total).proportion_ci(CONFIDENCE, "wilson")
    p = num_right / total
    return Spread(math.sqrt(p * (1 - p) / total), (float(interval.low), float(interval.high)))


def ratio(
    sums: Sequence[float], counts: Sequence[int], seed: int, function: Callable[[Array], Array] = np.asarray
) -> Spread | None:
    """Return the spread of function(sum of `sums` / sum of `counts`), [W] each. None for fewer than two windows."""

    def statistic(sums: Array, counts: Array, axis: int) -> Array:
        return function(sums.sum(axis) / counts.sum(axis))

    return _spread([sums, counts], statistic, seed, DRAWS, True)


def percentile(tokens: Sequence[Array], share: float, seed: int) -> Spread | None:
    """Return the spread of a percentile over the tokens of all windows, interpolated as numpy does.

    None for fewer than two windows.
    """
    values, windows = np.concatenate(tokens), np.repeat(np.arange(len(tokens)), [len(part) for part in tokens])
    order = np.argsort(values)
    values, windows = values[order], windows[order]

    def statistic(drawn: Array) -> float:
        ends = np.bincount(drawn.astype(int), minlength=len(tokens))[windows].cumsum()  # of each value's copies
        place = share * (ends[-1] - 1)
        low, high = values[np.searchsorted(ends, [math.floor(place), math.ceil(place)], side="right")]
        return float(low + (high - low) * (place - math.floor(place)))

    return _spread([np.arange(len(tokens), dtype=np.float64)], statistic, seed, PERCENTILE_DRAWS, False)


def ratio_difference(
    sums: Sequence[float], other_sums: Sequence[float], counts: Sequence[int], seed: int
) -> PairedDifference:
    """Return the difference of sum / count between two models on the same W windows, at least one.

    The interval and p are a paired bootstrap's. If no window differs, the interval is [0, 0]: models with equal
    numbers in every window, to the last digit, are equal.
    """
    differences, weights = np.subtract(sums, other_sums), np.asarray(counts, np.float64)
    value = float(differences.sum() / weights.sum())
    if len(sums) < MIN_WINDOWS:
        return PairedDifference(value, None, None)
    if not differences.any():
        return PairedDifference(0.0, (0.0, 0.0), 1.0)

    def statistic(differences: Array, weights: Array, axis: int) -> Array:
        ratios: Array = differences.sum(axis) / weights.sum(axis)
        return ratios

    _, interval, draws = _drawn([differences, weights], statistic, seed, DRAWS, True)
    beyond = min((draws <= 0).sum(), (draws >= 0).sum())
    p = min(1.0, 2 * (int(beyond) + 1) / (DRAWS + 1))  # Davison and Hinkley, Bootstrap Methods, 1997, section 4.2
    return PairedDifference(value, interval, p)


def accuracy_difference(right: Sequence[bool], other_right: Sequence[bool]) -> PairedDifference:
    """Return the difference of two accuracies on the same Q questions, at least one.

    p: McNemar's exact test. The interval: Tango's score interval (Statistics in Medicine 17, 1998, pages 891 to 908),
    which contains the differences that a score test does not reject. A bootstrap has the interval [0, 0] if no answer
    changed, also with ten questions. Tango's is then -z²/(Q + z²) to z²/(Q + z²), with z = 1.96: of 100 questions,
    -3.7 % to 3.7 %.
    """
    from scipy.stats import binomtest

    pairs = list(zip(right, other_right, strict=True))
    gained, lost = sum(now and not was for now, was in pairs), sum(was and not now for now, was in pairs)
    p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return PairedDifference((gained - lost) / len(pairs), _score_interval(gained, lost, len(pairs)), p)


def _score_interval(gained: int, lost: int, total: int) -> Interval:
    """Return Tango's interval of (gained - lost) / total."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    z = float(norm.ppf((1 + CONFIDENCE) / 2))

    def score(difference: float) -> float:
        """Return the test's statistic, standard normal if `difference` is the true one. Decreases with it."""
        # q: the most likely share of questions that only the other model answers, if `difference` is the true one
        b = (2 * total - gained + lost) * difference - gained - lost
        q = (math.sqrt(b * b + 8 * total * lost * difference * (1 - difference)) - b) / (4 * total)
        variance = total * max(0.0, 2 * q + difference * (1 - difference))
        excess = total * (value - difference)
        if excess == 0:
            return 0.0
        return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)

    value, limit = (gained - lost) / total, 1 - 1e-12
    low = brentq(lambda d: min(score(d), 2 * z) - z, -limit, value) if value > -limit else -1.0
    high = brentq(lambda d: max(score(d), -2 * z) + z, value, limit) if value < limit else 1.0
    return float(low), float(high)


def _spread(
    data: list[Sequence[float] | Array], statistic: Callable[..., object], seed: int, num_draws: int, vectorized: bool
) -> Spread | None:
    if len(data[0]) < 2:
        return None
    arrays = [np.asarray(part, np.float64) for part in data]
    stderr, interval, _ = _drawn(arrays, statistic, seed, num_draws, vectorized)
    if not np.isfinite([stderr, *interval]).all():
        return None
    return Spread(stderr, interval if len(data[0]) >= MIN_WINDOWS else None)


def _drawn(
    data: list[Array], statistic: Callable[..., object], seed: int, num_draws: int, vectorized: bool
) -> tuple[float, Interval, Array]:
    """Return a bootstrap's standard error, percentile interval and draws. `data` [W] each are resampled together."""
    from scipy.stats import bootstrap

    with np.errstate(over="ignore", invalid="ignore"):  # a perplexity beyond the largest float
        drawn = bootstrap(
            data, statistic, n_resamples=num_draws, paired=True, vectorized=vectorized, method="percentile",
            confidence_level=CONFIDENCE, batch=max(1, DRAWN_AT_ONCE // len(data[0])), rng=np.random.default_rng(seed),
        )  # fmt: skip
    low, high = drawn.confidence_interval
    return float(drawn.standard_error), (float(low), float(high)), drawn.bootstrap_distribution
