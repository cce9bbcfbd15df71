"""How many drafts pay: from the seconds that steps took, and from the share of drafts that stayed.

Drafts are taken in the order of their chance to stay for as long as tokens per second rise (goodput, arXiv 2406.14066). Times may decide
here, because no token depends on a draft.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Row
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from conf.speculation import Acceptance, DraftOrder
from pipelines.engine.request import Sequence

LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15)  # drafts of a row: few, so that few shapes of steps are recorded
FIRST_TIMES = 3  # steps of a size before its time counts: the first is computed by calls, the second recorded
ONE_READING = 16  # tokens for which a CPU reads each weight once: so many are tried, because they may cost nothing
TRIED = 1.5  # times the largest known size is tried, if that is more
NUM_TIMES = 8  # of which the least counts: a step that was interrupted took longer than the next one will
PROBE_EVERY = 32  # steps without a draft
PRIOR_WEIGHT = 2.0  # drafts that a row's first guess of its own chance is worth
MEMORY = 32.0  # drafts after which older ones count half: texts repeat themselves in stretches
MARGIN = 1.05  # of tokens per second: chances are guesses, and the best of many guesses promises too much
LEAST_GAIN = 0.01  # tokens that a draft gives by its chance: fewer are not looked at


class StepCosts:
    """Seconds of decode steps by their number of tokens."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}
        self._sizes: list[int] = []  # the known ones, in order
        self._seconds: dict[int, float] = {}  # what was asked for since a time changed

    def took(self, num_tokens: int, seconds: float) -> None:
        """Note what a step of so many tokens took."""
        times = self._times.setdefault(num_tokens, deque(maxlen=NUM_TIMES))
        times.append(seconds)
        if len(times) >= FIRST_TIMES and self._known.get(num_tokens) != (least := min(times)):
            self._known[num_tokens] = least
            self._sizes = sorted(self._known)
            self._seconds.clear()

    def seconds(self, num_tokens: int) -> float:
        """Return what a step takes: between two known sizes as much as on the line through them, infinity where nothing is known.

        Beyond the largest known size it takes as long up to ONE_READING, and from there grows as it did last, so that it is tried where
        that would pay. Further on it is infinite, so that no step is tried that may take several times as long.
        """
        found = self._seconds.get(num_tokens)
        if found is None:
            found = self._seconds[num_tokens] = self._estimate(num_tokens)
        return found

    def _estimate(self, size: int) -> float:
        sizes, known = self._sizes, self._known
        if not sizes or size > max(ONE_READING, math.ceil(TRIED * sizes[-1])):
            return math.inf
        above = bisect_left(sizes, size)
        if above == len(sizes):
            above -= 1
        first, last = sizes[max(0, above - 1)], sizes[above]
        growth = (known[last] - known[first]) / (last - first) if first < last else 0.0
        if size > last:
            growth = max(0.0, growth) if size > ONE_READING else 0.0
        return known[last] + growth * (size - last)


@dataclass
class Share:
    """The chance that a draft stays if those before it do."""

    num_accepted: float = 0.0
    num_tried: float = 0.0

    def add(self, num_accepted: int, num_drafts: int) -> None:
        """Count drafts up to the first one that was wrong; those after it say nothing."""
        if self.num_tried > MEMORY:
            self.num_accepted /= 2
            self.num_tried /= 2
        self.num_accepted += num_accepted
        self.num_tried += min(num_accepted + 1, num_drafts)

    def chance(self, prior: float) -> float:
        """Return the mean of the Beta distribution whose prior mean is `prior`."""
        return (self.num_accepted + PRIOR_WEIGHT * prior) / (self.num_tried + PRIOR_WEIGHT)


def draft_lengths(chances: Row[float], most: Row[int], num_tokens: int, costs: StepCosts) -> list[int]:
    """Return how many drafts each row gets, of `most`, beside the step's `num_tokens`: as many as give the most tokens per second.

    `chances`: of each row's drafts to stay.
    """
    gains = []
    for row, chance in enumerate(chances):
        gain = 1.0
        for _ in range(most[row]):
            gain *= chance
            if gain < LEAST_GAIN:
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
    """Gives every row of a step its number of drafts, by what it learned from the steps before."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._share = Share()  # of all rows
        self._own_shares: WeakKeyDictionary[Sequence, Share] = WeakKeyDictionary()
        self._paddle_lengths: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._num_without = 0  # steps since the last draft

    def lengths(self, rows: list[Sequence], most: list[int], num_tokens: int) -> list[int]:
        """Return how many drafts each row gets, at most `most`, in a step of `num_tokens` without them."""
        lengths = list(most)
        by_goodput = []
        for index, (row, wanted) in enumerate(zip(rows, most, strict=True)):
            settings = row.params.speculation
            if not wanted or not settings.adaptive:
                continue
            if settings.order is DraftOrder.paddle:
                lengths[index] = min(wanted, self._paddle_lengths.get(row, wanted))
            elif settings.acceptance is Acceptance.exact:
                by_goodput.append(index)
        if by_goodput:
            own = [rows[index] for index in by_goodput]
            for index, length in zip(
                by_goodput, self._of_goodput(own, [most[i] for i in by_goodput], num_tokens), strict=True
            ):
                lengths[index] = length
        return lengths

    def _of_goodput(self, rows: list[Sequence], most: list[int], num_tokens: int) -> list[int]:
        """Return the lengths that give the most tokens per second; every PROBE_EVERY-th step without a draft has one."""
        prior, unknown = self._share.chance(0.5), Share()
        chances = [self._own_shares.get(row, unknown).chance(prior) for row in rows]
        lengths = draft_lengths(chances, most, num_tokens, self.costs)
        self._num_without = 0 if any(lengths) else self._num_without + 1
        if self._num_without == PROBE_EVERY:
            self._num_without = 0
            lengths[chances.index(max(chances))] = 1
        return lengths

    def learn(self, row: Sequence, num_accepted: int, num_drafts: int) -> None:
        """Note how many of a row's drafts became tokens."""
        self._share.add(num_accepted, num_drafts)
        self._own_shares.setdefault(row, Share()).add(num_accepted, num_drafts)
        most = row.params.speculation.num_tokens
        length = self._paddle_lengths.get(row, most)
        self._paddle_lengths[row] = max(1, min(length + (2 if num_accepted == length else -1), most))
