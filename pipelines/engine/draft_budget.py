"""Chooses the number of draft tokens per row from measured step times and acceptance rates.

Drafts are taken in order of acceptance probability while the expected tokens per second increase (goodput, arXiv
2406.14066). Measured times may decide this, because drafts do not change the generated tokens.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Row
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from conf.speculation import Acceptance, DraftOrder
from pipelines.engine.request import Sequence

LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15)  # draft counts of a row: few values, so that few step shapes are recorded
# Number of measured steps of a size before their time is used: the first step runs eagerly, the second is recorded.
MIN_TIMES = 3
# Tokens for which a CPU reads each weight once. Steps up to this size are tried, because they may cost no more.
TOKENS_PER_READ = 16
TRIED_GROWTH = 1.5  # sizes up to this factor times the largest measured size are tried
# The minimum of so many recent times is used, because an interrupted step takes longer than a usual step.
NUM_TIMES = 8
PROBE_EVERY = 32  # after so many steps without a draft, one row gets a draft
PRIOR_WEIGHT = 2.0  # weight of the prior of a row's own rate, in drafts
MEMORY = 32.0  # drafts after which the counts are halved, because the rate changes along a text
# Required gain in tokens per second: the chances are estimates, and the best of many estimates is too optimistic.
MARGIN = 1.05
MIN_GAIN = 0.01  # expected tokens of a draft below which it is not considered


class StepCosts:
    """Measured seconds of decode steps, by number of tokens."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}
        self._sizes: list[int] = []  # the measured sizes, ascending
        self._seconds: dict[int, float] = {}  # cached estimates; cleared when a measured time changes

    def took(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step with `num_tokens` tokens."""
        times = self._times.setdefault(num_tokens, deque(maxlen=NUM_TIMES))
        times.append(seconds)
        if len(times) >= MIN_TIMES and self._known.get(num_tokens) != (least := min(times)):
            self._known[num_tokens] = least
            self._sizes = sorted(self._known)
            self._seconds.clear()

    def seconds(self, num_tokens: int) -> float:
        """Estimate the time of a step; infinity if nothing was measured.

        Between two measured sizes the estimate is linear. Above the largest measured size there are three cases. Up to
        TOKENS_PER_READ tokens the cost is the cost of the largest measured size, so that these sizes are tried. Up to
        TRIED_GROWTH times the largest measured size, the line through the last two measured sizes is extended. Beyond
        this the cost is infinite, so that no step is tried that may take several times as long.
        """
        seconds = self._seconds.get(num_tokens)
        if seconds is None:
            seconds = self._seconds[num_tokens] = self._estimate(num_tokens)
        return seconds

    def _estimate(self, size: int) -> float:
        sizes, known = self._sizes, self._known
        if not sizes or size > max(TOKENS_PER_READ, math.ceil(TRIED_GROWTH * sizes[-1])):
            return math.inf
        above = bisect_left(sizes, size)
        if above == len(sizes):
            above -= 1
        first, last = sizes[max(0, above - 1)], sizes[above]
        growth = (known[last] - known[first]) / (last - first) if first < last else 0.0
        if size > last:
            growth = max(0.0, growth) if size > TOKENS_PER_READ else 0.0
        return known[last] + growth * (size - last)


@dataclass
class AcceptanceRate:
    """Acceptance rate: the probability that a draft is accepted if all drafts before it are."""

    num_accepted: float = 0.0
    num_tried: float = 0.0

    def add(self, num_accepted: int, num_drafts: int) -> None:
        """Count drafts up to the first rejected draft. Later drafts carry no information."""
        if self.num_tried > MEMORY:
            self.num_accepted /= 2
            self.num_tried /= 2
        self.num_accepted += num_accepted
        self.num_tried += min(num_accepted + 1, num_drafts)

    def chance(self, prior: float) -> float:
        """Return the mean of the Beta distribution whose prior mean is `prior`."""
        return (self.num_accepted + PRIOR_WEIGHT * prior) / (self.num_tried + PRIOR_WEIGHT)


def draft_lengths(chances: Row[float], most: Row[int], num_tokens: int, costs: StepCosts) -> list[int]:
    """Return the number of drafts for each row, at most `most[i]`, that gives the most tokens per second.

    `num_tokens`: tokens of the step without drafts. `chances`: acceptance probability of each row's drafts.
    """
    gains = []
    for row, chance in enumerate(chances):
        gain = 1.0
        for _ in range(most[row]):
            gain *= chance
            if gain < MIN_GAIN:
                break
            gains.append((gain, row))
    gains.sort(reverse=True)
    tokens, best, num_best = float(len(chances)), MARGIN * len(chances) / costs.seconds(num_tokens), 0
    for count, (gain, _) in enumerate(gains, 1):
        tokens += gain
        goodput = tokens / costs.seconds(num_tokens + count)
        if goodput > best:
            best, num_best = goodput, count
    lengths = [0] * len(chances)
    for _, row in gains[:num_best]:
        lengths[row] += 1
    return [max(length for length in LENGTHS if length <= n) for n in lengths]


class DraftBudget:
    """Assigns each row of a step its number of drafts, from statistics of earlier steps."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._rate = AcceptanceRate()  # of all rows
        self._row_rates: WeakKeyDictionary[Sequence, AcceptanceRate] = WeakKeyDictionary()
        self._paddle_lengths: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._num_without = 0  # steps since the last draft

    def lengths(self, rows: list[Sequence], most: list[int], num_tokens: int) -> list[int]:
        """Return the number of drafts for each row, at most `most[i]`.

        `num_tokens`: tokens of the step without drafts.
        """
        lengths = list(most)
        by_goodput = []
        for index, (row, limit) in enumerate(zip(rows, most, strict=True)):
            settings = row.params.speculation
            if not limit or not settings.adaptive:
                continue
            if settings.order is DraftOrder.paddle:
                lengths[index] = min(limit, self._paddle_lengths.get(row, limit))
            elif settings.acceptance is Acceptance.exact:
                by_goodput.append(index)
        if by_goodput:
            goodput_rows = [rows[index] for index in by_goodput]
            for index, length in zip(
                by_goodput,
                self._lengths_by_goodput(goodput_rows, [most[i] for i in by_goodput], num_tokens),
                strict=True,
            ):
                lengths[index] = length
        return lengths

    def _lengths_by_goodput(self, rows: list[Sequence], most: list[int], num_tokens: int) -> list[int]:
        """Return the lengths with the most tokens per second.

        After PROBE_EVERY - 1 steps without a draft, one row gets one draft.
        """
        prior, unknown = self._rate.chance(0.5), AcceptanceRate()
        chances = [self._row_rates.get(row, unknown).chance(prior) for row in rows]
        lengths = draft_lengths(chances, most, num_tokens, self.costs)
        self._num_without = 0 if any(lengths) else self._num_without + 1
        if self._num_without == PROBE_EVERY:
            self._num_without = 0
            lengths[chances.index(max(chances))] = 1
        return lengths

    def learn(self, row: Sequence, num_accepted: int, num_drafts: int) -> None:
        """Record how many of a row's drafts were accepted."""
        self._rate.add(num_accepted, num_drafts)
        self._row_rates.setdefault(row, AcceptanceRate()).add(num_accepted, num_drafts)
        most = row.params.speculation.num_tokens
        length = self._paddle_lengths.get(row, most)
        self._paddle_lengths[row] = max(1, min(length + (2 if num_accepted == length else -1), most))
