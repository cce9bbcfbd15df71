"""JSON schemas as llguidance takes them. Of the standard library alone."""

import math
from typing import Any

from conf.errors import UserError, shortened

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Those that llguidance writes. JSON Schema lets a reader pass over others."""
DATA = ("default", "examples", "example")
"""Keywords whose values are no schemas and change no text."""
LITERALS = ("const", "enum")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by names, which are no keywords."""
NO_LIMITS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Values that allow everything, of keywords that llguidance refuses."""


def prepared(schema: Any) -> Any:
    """Return a schema that allows the same texts, without keywords that limit nothing and that llguidance refuses.

    llguidance reads numbers as floats. A bound that no float holds becomes a little narrower. Raises UserError for another such number.
    """
    if isinstance(schema, list):
        return [prepared(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for keyword, value in schema.items():
        if keyword == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if any(type(value) is type(free) and value == free for free in NO_LIMITS.get(keyword, ())):
            continue
        if keyword in BOUNDS:
            value = _rounded_inward(keyword, value)
        if keyword in (*LITERALS, *BOUNDS, "multipleOf"):
            _check_exact(keyword, value)
        elif keyword in BY_NAME and isinstance(value, dict):
            value = {name: prepared(each) for name, each in value.items()}
        elif keyword not in DATA:
            value = prepared(value)
        kept[keyword] = value
    return kept


def _check_exact(keyword: str, value: Any) -> None:
    """Raise UserError for a whole number that is not exact as a 64-bit float and integer, at any depth."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_exact(keyword, each)
    if isinstance(value, int) and not (-(2**63) <= value < 2**64 and int(float(value)) == value):
        raise UserError(
            f"the JSON schema has {keyword} {shortened(str(value))}, which no 64-bit float holds, so that another number would be "
            "written: give a number up to 2**53, or texts instead of numbers"
        )


def _rounded_inward(keyword: str, value: Any) -> Any:
    """Return a bound as a number that a float holds, on the side of it that is allowed."""
    if not isinstance(value, int) or abs(value) > 2**64 or int(float(value)) == value:
        return value
    inward = math.inf if "inimum" in keyword else -math.inf
    nearest = float(value)
    is_outside = nearest < value if inward > 0 else nearest > value
    return int(math.nextafter(nearest, inward)) if is_outside else int(nearest)
