"""Read arguments that are nested elements named by their keys, as MiniMax M3 writes them.

A marker stands before each tag: `MARKER<city>ParisMARKER</city>`. The items of a list are elements `item`, or elements
with one name.
"""

import json
from typing import Any

from models.chat.schemas import Parameters, allows_only_strings, member
from models.chat.stream import Reading, TextStream
from models.chat.values import MAX_DEPTH, Malformed, json_of_literal

MAX_KEY = 256
ITEM = "item"


def read_element(stream: TextStream, marker: str, schema: Any, root: Parameters, depth: int = 0) -> Reading[Any]:
    """Return the value of an element, and read it to the end of its closing tag.

    `schema`: the element's schema in the tool's schema `root`. It tells strings from other values. Raises Malformed for
    an element that does not end.
    """
    if depth > MAX_DEPTH:
        raise Malformed
    text: list[str] = []
    children: list[tuple[str, Any]] = []
    while (yield from stream.until((marker,), text.append)):
        is_end = yield from stream.take("</")
        if not is_end and not (yield from stream.take("<")):
            raise Malformed
        key: list[str] = []
        if not (yield from stream.until((">",), key.append, MAX_KEY)):
            raise Malformed
        if is_end:
            return _joined(children) if children else _leaf("".join(text), schema, root)
        name = "".join(key).strip()
        children.append((name, (yield from read_element(stream, marker, member(schema, name, root), root, depth + 1))))
    raise Malformed


def _leaf(text: str, schema: Any, root: Parameters) -> Any:
    return text if allows_only_strings(schema, root) else json.loads(json_of_literal(text))


def _joined(children: list[tuple[str, Any]]) -> Any:
    """Return a list of items, or an object. A key that is repeated holds a list."""
    if all(name == ITEM for name, _ in children):
        return [value for _, value in children]
    values: dict[str, list[Any]] = {}
    for name, value in children:
        values.setdefault(name, []).append(value)
    return {name: items if len(items) > 1 else items[0] for name, items in values.items()}


def write_element(marker: str, name: str, value: Any) -> str:
    """Return a value as an element, as the template of MiniMax M3 writes it."""
    return f"{marker}<{name}>{write_elements(marker, value)}{marker}</{name}>"


def write_elements(marker: str, value: Any) -> str:
    """Return the inside of an element."""
    if isinstance(value, dict):
        return "".join(write_element(marker, name, item) for name, item in value.items())
    if isinstance(value, list):
        return "".join(write_element(marker, ITEM, item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)
