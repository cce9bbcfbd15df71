"""How many drafts pay: from the seconds that steps took, and from the share of drafts that stayed.

Drafts are taken in the order of their chance to stay for as long as tokens per second rise (goodput, arXiv 2406.14066). Times may decide
here, because no token depends on a draft.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15)  # drafts of a row: few, so that few shapes of steps are recorded
EXACT_TOKENS = 16  # steps of so many tokens are told apart; larger ones by eights
NUM_TIMES = 8  # of which the least counts: a step that was recorded or interrupted took longer than the next one will
PROBE_EVERY = 32  # steps without a draft
PRIOR_WEIGHT = 2.0  # drafts that a row's first guess of its own chance is worth
MEMORY = 32.0  # drafts after which older ones count half: texts repeat themselves in stretches


class StepCosts:
    """Seconds of decode steps by their number of tokens."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}

    def took(self, num_tokens: int, seconds: float) -> None:
        """Note what a step of so many tokens took."""
        self._times.setdefault(_bucket(num_tokens), deque(maxlen=NUM_TIMES)).append(seconds)

    def seconds(self, num_tokens: int) -> float:
        """Return what a step takes, 1 where nothing is known. A size that was not seen counts as the next smaller one: so it is tried."""
        bucket = _bucket(num_tokens)
        smaller = [size for size in self._times if size <= bucket]
        known = max(smaller) if smaller else min(self._times, default=None)
        return 1.0 if known is None else min(self._times[known])


def _bucket(num_tokens: int) -> int:
    return num_tokens if num_tokens <= EXACT_TOKENS else -(-num_tokens // 8) * 8


@dataclass
class Acceptance:
    """The chance that a draft stays if those before it do."""

    num_accepted: float = 0.0
    num_tried: float = 0.0

    def add(self, num_accepted: int, num_drafts: int) -> None:
        """Count drafts up to the first one that was wrong; those behind it say nothing."""
        if self.num_tried > MEMORY:
            self.num_accepted /= 2
            self.num_tried /= 2
        self.num_accepted += num_accepted
        self.num_tried += min(num_accepted + 1, num_drafts)

    def chance(self, prior: float) -> float:
        """Return the mean of the Beta distribution whose prior mean is `prior`."""
        return (self.num_accepted + PRIOR_WEIGHT * prior) / (self.num_tried + PRIOR_WEIGHT)


def draft_lengths(chances: Sequence[float], most: Sequence[int], num_tokens: int, costs: StepCosts) -> list[int]:
    """Return how many drafts each row gets, of `most`, beside the step's `num_tokens`: as many as give the most tokens per second.

    `chances`: of each row's drafts to stay.
    """
    gains = sorted(
        ((chance**place, row) for row, chance in enumerate(chances) for place in range(1, most[row] + 1)), reverse=True
    )
    rows, best, num_best = float(len(chances)), len(chances) / costs.seconds(num_tokens), 0
    for count, (gain, _) in enumerate(gains, 1):
        rows += gain
        goodput = rows / costs.seconds(num_tokens + count)
        if goodput > best:
            best, num_best = goodput, count
    lengths = [0] * len(chances)
    for _, row in gains[:num_best]:
        lengths[row] += 1
    return [max(length for length in LENGTHS if length <= n) for n in lengths]
