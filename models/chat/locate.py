"""Find the needles of a call in a rendering, and the body in which they are written."""

import json
import re
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from models.chat.description import Body, CallFormat, Keys, Tag
from models.chat.needles import ARGUMENTS, NUMBER, NUMBER_KEY, TEXT, TEXT_KEY

MAX_PLACES = 4
"""Most places of a name at which a call is sought. Formats with recipients write it twice."""
MAX_BRACES = 4
"""Most opening braces before the name that may begin the call's object."""


@dataclass(frozen=True)
class Place:
    """A call in a text, from its name or object to its arguments, and what the text between them shows."""

    start: int
    end: int
    form: CallFormat


def locate(text: str, name: str, id: str, start: int = 0) -> Place | None:
    """Return the place of the call with this name; None if it is not readable. Its arguments are ARGUMENTS."""
    for match in islice(re.finditer(rf"(?<![a-z]){name}(?![a-z])", text[start:]), MAX_PLACES):
        position = start + match.start()
        for find in (_object, _json, _gemma, _python, _tagged):
            if place := find(text, position, name, id):
                return place
    return None


def _object(text: str, position: int, name: str, id: str) -> Place | None:
    """Find a JSON object with the name and the arguments: the outermost of the first braces that holds one call."""
    place, brace = None, position
    for _ in range(MAX_BRACES):
        brace = text.rfind("{", 0, brace)
        if brace < 0:
            break
        value, end = _decoded(text, brace)
        if not isinstance(value, dict) or end < position:
            continue
        function = value.get("function")
        if keys := _keys(function if isinstance(function, dict) else value, value, name, id):
            place = Place(brace, end, CallFormat(Body.object, keys=keys))
    return place


def _keys(value: dict[str, Any], outer: dict[str, Any], name: str, id: str) -> Keys | None:
    if value.get(name) == ARGUMENTS:
        return Keys(None, "")
    names = [key for key, item in value.items() if item == name]
    arguments = [key for key, item in value.items() if item == ARGUMENTS]
    ids = [key for key, item in outer.items() if item == id or (key.endswith("id") and isinstance(item, str))]
    if not names or not arguments:
        return None
    is_late = ids == ["id"] and _index(value, "id") > _index(value, arguments[0])  # behind streamed arguments
    return Keys(names[0], arguments[0], ids[0] if ids and not is_late else None)


def _index(value: dict[str, Any], key: str) -> int:
    return [*value, key].index(key)


def _json(text: str, position: int, name: str, id: str) -> Place | None:
    """Find a name, and behind it the arguments as JSON, with an id between them if there is one."""
    brace = text.find("{", position)
    value, end = _decoded(text, brace) if brace >= 0 else (None, 0)
    if value != ARGUMENTS:
        return None
    between = text[position + len(name) : brace]
    form = CallFormat(Body.json, name_close=between)
    if id in between:
        id_open, _, name_close = between.partition(id)
        form = replace(form, id_open=id_open, name_close=name_close)
    return Place(position, end, form)


def _gemma(text: str, position: int, name: str, id: str) -> Place | None:
    match = re.match(
        rf"{name}\{{{TEXT_KEY}:(?P<quote>\S{{1,20}}?){TEXT}(?P=quote),\s?{NUMBER_KEY}:{NUMBER}\}}", text[position:]
    )
    if not match:
        return None
    return Place(position, position + match.end(), CallFormat(Body.gemma, quote=match["quote"]))


def _python(text: str, position: int, name: str, id: str) -> Place | None:
    quoted = rf"(?P<quote>['\"]){TEXT}(?P=quote)"
    match = re.match(rf"{name}\({TEXT_KEY}={quoted},\s?{NUMBER_KEY}={NUMBER}\)", text[position:])
    return Place(position, position + match.end(), CallFormat(Body.python)) if match else None


def _tagged(text: str, position: int, name: str, id: str) -> Place | None:
    """Find a name, and behind it keys and values between tags."""
    ends, end = [], position
    for needle in (name, TEXT_KEY, TEXT, NUMBER_KEY, str(NUMBER)):
        start = text.find(needle, end)
        if start < 0 or start - end > 200:
            return None
        end = start + len(needle)
        ends.append((start, end))
    pieces = [text[ends[i][1] : ends[i + 1][0]] for i in range(4)]
    before_key, text_close, between, number_close = pieces
    if not text_close.strip():
        return None
    tag = Tag(between, number_close, "", None if text_close == number_close else text_close)
    return Place(position, end, CallFormat(Body.tagged, name_close=before_key, tag=tag))


def _decoded(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON value at a position, and where it ends; None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, position)
    except (ValueError, RecursionError):
        return None, 0
