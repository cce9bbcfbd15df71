"""The tiers in which the cases of a product run: `make test`, `make test-all` or `make test-matrix`."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def tiers(every: Iterable[Any], quick: Collection[Any] = (), long: Collection[Any] = ()) -> list[Any]:
    """Return all values, or tuples of values, as cases: cases of `quick` have no mark, cases of `long` the mark long,
    all others matrix."""
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
    """Return each value once, with one combination of the other parameters. The combinations cycle, starting at number
    `first`."""
    combinations = list(product(*others))
    return [(value, *combinations[(first + i) % len(combinations)]) for i, value in enumerate(values)]
