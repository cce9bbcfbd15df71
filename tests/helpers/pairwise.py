"""Combinations in which every two values of different factors are together at least once."""

from collections.abc import Collection
from itertools import combinations, product
from typing import Any


def pairwise(*factors: Collection[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of one value of each factor. Each one has as many new pairs as possible."""
    every = [*product(*factors)]
    cells, missing = list[tuple[Any, ...]](), {pair for values in every for pair in _pairs(values)}
    while missing:
        cells.append(max(every, key=lambda values: len(missing & _pairs(values))))
        missing -= _pairs(cells[-1])
    return cells


def _pairs(values: tuple[Any, ...]) -> set[Any]:
    return {*combinations(enumerate(values), 2)}
