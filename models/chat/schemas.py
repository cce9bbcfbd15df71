"""Whether a tool's schema allows only strings for a parameter."""

from collections.abc import Mapping
from typing import Any

Parameters = Mapping[str, Any]
"""The JSON schema of a tool's arguments."""


def is_string(parameters: Parameters | None, name: str) -> bool:
    """Return whether a parameter's value is always a string. False for a parameter without a schema."""
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(schema, parameters or {}, 8) == {"string"}


def _types(schema: Any, root: Parameters, depth: int) -> set[str]:
    """Return the JSON types that a schema allows; {"any"} if it does not restrict them."""
    if not isinstance(schema, Mapping) or depth == 0:
        return {"any"}
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(name) for name in kind}
    if isinstance(path := schema.get("$ref"), str):
        return _types(_target(path, root), root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return {"string" if isinstance(value, str) else "other" for value in values}
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(keyword), list) and options:
            return set().union(*(_types(option, root, depth - 1) for option in options[:32]))
    return {"any"}


def _target(path: str, root: Parameters) -> Any:
    """Return the schema at a JSON pointer `#/...` in the root; None if there is none."""
    target: Any = root
    for step in path.removeprefix("#").split("/")[1:] if path.startswith("#") else [""]:
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, Mapping) else None
    return target
