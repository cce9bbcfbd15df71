"""Guides, and checks whether a text matches them. The checks use json, re and a small JSON Schema checker, not the
library of the product."""

import json
import re
from typing import Any

SCHEMA: dict[str, Any] = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "word": {"enum": ["one", "zwei", "三", 'q"\\/\n']},
                "leaves": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
            },
            "required": ["word", "leaves"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
FLAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -3, "maximum": 12},
        "b": {"type": "boolean"},
        "s": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]},
    },
    "required": ["n", "s"],
    "additionalProperties": False,
}
LARK = 'start: item ("," item)*\nitem: NAME "=" (NAME | list)\nlist: "[" item "]"\nNAME: /[a-e]{1,3}/'
GUIDES: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"json_schema": FLAT},
    {"json_object": True},
    {"regex": r"(x|yy)/[0-9]{2}\n.é?"},
    {"choice": ["yes", "yesterday", "no\n", 'a "quoted" \\ 🙂']},
    {"lark": LARK},
]


def keeps_to(text: str, guide: dict[str, Any]) -> bool:
    """Return whether a whole text is in the guide's grammar."""
    ((kind, value),) = guide.items()
    match kind:
        case "json_schema":
            return conforms(json.loads(text), value, value)
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch(value, text) is not None
        case "choice":
            return text in value
    assert value == LARK
    while (shorter := re.sub(r"\[[a-e]{1,3}=[a-e]{1,3}\]", "a", text)) != text:  # replaces the innermost list by a name
        text = shorter
    return re.fullmatch(r"[a-e]{1,3}=[a-e]{1,3}(?:,[a-e]{1,3}=[a-e]{1,3})*", text) is not None


def conforms(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Return whether a value conforms to a schema (JSON Schema 2020-12, only the keywords that the tests use)."""
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in schema:
        return any(conforms(value, option, root) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            return len(value) <= schema["maxItems"] and all(conforms(item, schema["items"], root) for item in value)
    assert schema["type"] == "object"
    properties = schema["properties"]
    return set(schema["required"]) <= set(value) <= set(properties) and all(
        conforms(item, properties[name], root) for name, item in value.items()
    )
