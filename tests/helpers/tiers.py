"""Which cases of a whole product run in which tier: `make test`, `make test-all` or `make test-matrix`."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def tiers(every: Iterable[Any], quick: Collection[Any] = (), long: Collection[Any] = ()) -> list[Any]:
    """All values, or tuples of them, as cases: those of `quick` have no mark, those of `long` have that one, the others have `matrix`."""
    values = list(every)
    assert {*quick, *long} <= {*values}
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else pytest.mark.long if value in long else pytest.mark.matrix,
        )
        for value in values
    ]


def in_turn(values: Iterable[Any], *others: Iterable[Any], first: int = 0) -> list[tuple[Any, ...]]:
    """Each value once, with one combination of the others. These follow each other, from number `first` on, and begin again."""
    combinations = list(product(*others))
    return [(value, *combinations[(first + i) % len(combinations)]) for i, value in enumerate(values)]
