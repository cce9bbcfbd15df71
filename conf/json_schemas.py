"""Prepare JSON schemas for llguidance. Imports only the standard library."""

import math
from typing import Any

from conf.errors import UserError, shortened

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""The formats that llguidance supports. JSON Schema allows a reader to ignore all other formats."""
DATA = ("default", "examples", "example")
"""Keywords whose values are not schemas and do not change the text."""
LITERALS = ("const", "enum")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map names to schemas. The names are not keywords."""
NO_LIMITS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Values that allow everything, by keyword; llguidance rejects these keywords."""


def prepared(schema: Any) -> Any:
    """Return an equivalent schema without keywords that restrict nothing and that llguidance rejects.

    llguidance reads numbers as floats. A bound that is not exact as a float becomes slightly narrower. Raises UserError
    for any other number that is not exact.
    """
    if isinstance(schema, list):
        return [prepared(subschema) for subschema in schema]
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
            value = {name: prepared(subschema) for name, subschema in value.items()}
        elif keyword not in DATA:
            value = prepared(value)
        kept[keyword] = value
    return kept


def _check_exact(keyword: str, value: Any) -> None:
    """Raise UserError for an integer, at any depth, that is not exact as a 64-bit float and as a 64-bit integer."""
    if isinstance(value, dict | list):
        for element in value.values() if isinstance(value, dict) else value:
            _check_exact(keyword, element)
    if isinstance(value, int) and not (-(2**63) <= value < 2**64 and int(float(value)) == value):
        raise UserError(
            f"the JSON schema has {keyword} {shortened(str(value))}, which no 64-bit float holds, so that another number would be "
            "written: give a number up to 2**53, or texts instead of numbers"
        )


def _rounded_inward(keyword: str, value: Any) -> Any:
    """Return the bound, or the nearest float within the allowed range."""
    if not isinstance(value, int) or abs(value) > 2**64 or int(float(value)) == value:
        return value
    inward = math.inf if "inimum" in keyword else -math.inf
    nearest = float(value)
    is_outside = nearest < value if inward > 0 else nearest > value
    return int(math.nextafter(nearest, inward)) if is_outside else int(nearest)
