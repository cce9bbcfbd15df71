"""Choose a format for each group of layers within a budget of bytes (quant=auto)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A format of a group of layers."""

    format: str
    """As in `quant.overrides`."""
    num_bytes: int
    loss: float
    """Increase of the model's loss, in nats, if only this group has this format."""


def allocate(groups: Sequence[Sequence[Candidate]], max_bytes: int) -> list[Candidate]:
    """Return a candidate of each group: at most `max_bytes` in all, with a small sum of losses.

    Every group begins with its smallest candidate. A step replaces a candidate by the next one on the lower convex hull
    of its group. Steps are taken in the order of their decrease of loss per byte, if they fit into the budget. Raises
    ValueError if the smallest candidates exceed the budget.
    """
    hulls = [_lower_hull(group) for group in groups]
    chosen = [0] * len(hulls)
    free = max_bytes - sum(hull[0].num_bytes for hull in hulls)
    if free < 0:
        raise ValueError(f"{max_bytes} bytes are less than the smallest candidates")
    steps = sorted(
        ((_slope(hull[i], hull[i + 1]), group, i) for group, hull in enumerate(hulls) for i in range(len(hull) - 1)),
    )
    for _, group, i in steps:
        cost = hulls[group][i + 1].num_bytes - hulls[group][i].num_bytes
        if chosen[group] == i and cost <= free:
            chosen[group], free = i + 1, free - cost
    return [hull[index] for hull, index in zip(hulls, chosen, strict=True)]


def _slope(small: Candidate, large: Candidate) -> float:
    return (large.loss - small.loss) / (large.num_bytes - small.num_bytes)


def _lower_hull(group: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates on the lower convex hull of loss over bytes, while the loss decreases; smallest first."""
    hull: list[Candidate] = []
    for candidate in sorted(group, key=lambda candidate: (candidate.num_bytes, candidate.loss)):
        if hull and candidate.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], candidate):
            hull.pop()
        hull.append(candidate)
    return hull
