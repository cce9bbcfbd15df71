"""The types of values that a tool's schema allows."""

from collections.abc import Mapping
from typing import Any

MAX_STEPS = 8
"""Most references that are followed."""
Parameters = Mapping[str, Any]
"""The JSON schema of a tool's arguments."""


def is_string(parameters: Parameters | None, name: str) -> bool:
    """Return whether a parameter's value is always a string. False for a parameter without a schema."""
    root = parameters or {}
    properties = root.get("properties")
    return allows_only_strings(properties.get(name) if isinstance(properties, Mapping) else None, root)


def allows_only_strings(schema: Any, root: Parameters) -> bool:
    """Return whether a schema within the schema `root` allows only strings."""
    return _types(schema, root, MAX_STEPS) == {"string"}


def member(schema: Any, name: str, root: Parameters) -> Any:
    """Return the schema of an object's property, or of a list's items; None if there is none."""
    for _ in range(MAX_STEPS):
        if not isinstance(schema, Mapping):
            return None
        if not isinstance(path := schema.get("$ref"), str):
            break
        schema = _target(path, root)
    properties = schema.get("properties")
    return properties[name] if isinstance(properties, Mapping) and name in properties else schema.get("items")


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
