"""Guides: grammars for structured output, as settings name them. Imports only the standard library."""

import json
import re
from typing import Any

from conf.errors import UserError, shortened
from conf.json_schemas import prepared

KINDS = ("json_schema", "json_object", "regex", "choice", "lark")
MAX_BYTES = 256 * 1024  # of a guide as JSON
MAX_CHOICES = 1024
# The spacing that models were trained on.
CALL_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The only x-guidance that a Lark grammar may have; tool calls use it. Other options could disable schema keywords."""
MAX_LARK_RULES = 500  # lines with a colon; a grammar of r rules takes r**3 time to compile, 0.3 s for 500


def check_guide(guide: Any) -> None:
    """Raise UserError unless the guide is a mapping of exactly one of KINDS to a valid value, of at most MAX_BYTES."""
    if not isinstance(guide, dict) or len(guide) != 1 or next(iter(guide)) not in KINDS:
        allowed = "{json_schema: {...}}, {json_object: true}, {regex: TEXT}, {choice: [TEXT, ...]} or {lark: TEXT}"
        raise UserError(f"decode.guide={shortened(repr(guide))} is not allowed: give one of {allowed}, or null")
    ((kind, value),) = guide.items()
    if (allowed_values := _allowed_values(kind, value)) is not None:
        raise UserError(f"decode.guide.{kind}={shortened(repr(value))} is not allowed: give {allowed_values}")
    try:
        size = len(guide_text(guide).encode())
    # An unpaired surrogate raises a ValueError.
    except (TypeError, ValueError, RecursionError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"decode.guide.{kind} is no JSON: {reason}: give what JSON can hold") from error
    if size > MAX_BYTES:
        raise UserError(f"decode.guide.{kind} has {size} bytes as JSON: give at most {MAX_BYTES}")
    if kind == "json_schema":
        try:
            prepared(value)
        except (UserError, RecursionError) as error:
            reason = "it has too many levels" if isinstance(error, RecursionError) else str(error)
            raise UserError(f"decode.guide.json_schema cannot be used: {reason}") from error


def guide_text(guide: dict[str, Any]) -> str:
    """Return a guide as JSON, with its keys in the given order: object properties are generated in this order."""
    return json.dumps(guide, ensure_ascii=False, allow_nan=False)


def _allowed_values(kind: str, value: Any) -> str | None:
    """Return the allowed values of a kind of guide; None if the value is allowed."""
    match kind:
        case "json_schema":
            holds = isinstance(value, dict) and "x-guidance" not in value
            allowed = "a JSON schema that is an object, without x-guidance"
        case "json_object":
            holds, allowed = value is True, "true"
        case "choice":
            holds = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
            holds = holds and all(isinstance(text, str) and text for text in value)
            allowed = f"1 to {MAX_CHOICES} texts that are not empty"
        case "regex":
            holds, allowed = isinstance(value, str) and value != "", "a regular expression that is not empty"
        case _:
            holds = isinstance(value, str) and value.strip() != "" and not _has_options(value)
            holds = holds and sum(":" in line for line in value.splitlines()) <= MAX_LARK_RULES
            allowed = f"a Lark grammar of at most {MAX_LARK_RULES} rules (lines with a colon), without x-guidance"
    return None if holds else allowed


def _has_options(lark: str) -> bool:
    """Whether a grammar has an x-guidance other than CALL_SPACING, also if it is spelled with JSON escapes."""
    other_text = lark.replace(f'"x-guidance": {json.dumps(CALL_SPACING)}', "")
    return "x-guidance" in re.sub(r"\\u([0-9a-fA-F]{4})", lambda escape: chr(int(escape[1], 16)), other_text)
