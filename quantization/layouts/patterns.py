"""Compile regular expressions from a checkpoint.

They are untrusted. Python's matcher tries all ways to match before it fails, so an expression with too many ways is
refused.
"""

import re
from functools import cache
from math import prod
from re import _parser  # type: ignore[attr-defined]  # the tree of an expression has no public name
from typing import Any

from conf.errors import UserError

MAX_LENGTH = 1000  # characters
NAME_LENGTH = 64  # about the longest layer name
# The slowest expression measured within this limit takes 31 ms per name; real ones have up to three `.*`.
MAX_WAYS = NAME_LENGTH**4 * 4


@cache
def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression. Raises UserError if it is invalid, or if matching could take too long."""
    short = repr(text if len(text) <= 60 else text[:60] + "...")
    try:
        ways = _ways(_parser.parse(text)) if len(text) <= MAX_LENGTH else MAX_WAYS + 1
        if ways <= MAX_WAYS:
            return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"quantization_config: {short} is not a regular expression: {error}") from error
    remedy = "write it without repetitions within repetitions, or with fewer of them"
    raise UserError(f"quantization_config: {short} could take too long to match a layer's name: {remedy}")


def _ways(tree: Any) -> float:
    """Return an upper bound on the number of ways to match the start of a name; infinite if it is not easily computed."""
    return prod((_ways_of_part(str(kind), value) for kind, value in tree), start=1.0)


def _ways_of_part(kind: str, value: Any) -> float:
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, part = value
        if most == 1:
            return 1 + _ways(part)
        shortest, longest = part.getwidth()
        is_fixed = shortest == longest > 0 and _ways(part) == 1
        return min(most - least + 1, NAME_LENGTH) if is_fixed else float("inf")
    if kind == "BRANCH":
        return sum(map(_ways, value[1]))
    if kind == "SUBPATTERN":
        return _ways(value[-1])
    if kind in ("ASSERT", "ASSERT_NOT"):
        return _ways(value[1])
    return 1 if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT") else float("inf")
