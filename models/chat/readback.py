"""Read renderings of a template back, to show that a description fits it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from models.chat.calls import Tools
from models.chat.cuts import without_end_markers
from models.chat.description import Body, ChatFormat
from models.chat.history import HistoryForm, Message
from models.chat.needles import USER, Renderings, answer, call, user
from models.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from models.chat.probe import Turn
from models.chat.reader import AnswerReader

SCHEMA = {
    "city": {"type": "string", "description": "d"},
    "sure": {"type": "boolean", "description": "d"},
    "none": {"type": ["string", "null"], "description": "d"},
    "nested": {"type": "object", "description": "d", "properties": {}},
    "list": {"type": "array", "description": "d", "items": {"type": "string"}},
    "share": {"type": "number", "description": "d"},
    "digits": {"type": "string", "description": "d"},
}
NAMES = ("get_weather", "stop")
"""Names of the calls. The template is given the tools of the needles: a text that it writes of them stays the same."""
VALUES = {
    "city": "Pa\"r'is \\ n\n<b> 北京",
    "sure": True,
    "none": None,
    "nested": {"a": [1, {"b": "x, y}"}], "c": False},
    "list": ["q]", "z"],
    "share": -1.5,
    "digits": "37",
}
UNQUOTED = VALUES | {"city": "Paris\n<b> 北京"}
"""Values for templates that write strings between quotes without escapes."""
CONTENT, THOUGHT = "Let me see.", "The user asks.\nI look."


@dataclass(frozen=True)
class Read:
    """An answer as it was read, or as it must be read."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """Names and arguments."""
    ids: tuple[str | None, ...]


def reads_back(renderings: Renderings, form: ChatFormat, history: HistoryForm, turn: Turn) -> bool:
    """Return whether the description reads what the template writes: names, typed arguments, order, content, ids."""
    is_python = form.calls is not None and form.calls.body is Body.python
    for values in (VALUES, UNQUOTED) if is_python else (VALUES,):
        written = written_answers(renderings, history, values)
        if written and all(_reads(text, message, form, turn) for text, message in written):
            return True
    return False


def written_answers(
    renderings: Renderings, history: HistoryForm, values: Mapping[str, Any] = MappingProxyType(VALUES)
) -> list[tuple[str, Message]]:
    """Return answers with calls, and the text of each behind the user's message.

    An answer with content is left out if the template refuses it, or omits its calls.
    """
    calls = [call("get_weather", dict(values), 0), call("stop", {}, 1), call("stop", {"city": "Rome"}, 2)]
    groups = [[item] for item in calls] if history.max_calls == 1 else [calls]
    messages = [*(answer(None, group) for group in groups), answer(CONTENT, groups[0], THOUGHT)]
    texts = [renderings.behind(USER, [user(), message], history) for message in messages]
    if texts[-1] is None or "get_weather" not in texts[-1]:
        texts.pop()
    return [] if None in texts else [(text or "", message) for text, message in zip(texts, messages, strict=False)]


def _reads(tail: str, message: Message, form: ChatFormat, turn: Turn) -> bool:
    read = merged(read_parts(form, turn, [answer_text(tail, form, turn)]))
    return same(read, tail, message) and _ids_match(read, tail, message, form)


def same(read: Read, tail: str, message: Message) -> bool:
    """Return whether an answer was read as it was given, except for its ids."""
    expected = replace(expected_read(tail, message), ids=read.ids)
    if read.reasoning == expected.content and not expected.reasoning:  # gpt-oss: text before a call is reasoning
        expected = replace(expected, content="", reasoning=read.reasoning)
    return read == expected


def _ids_match(read: Read, tail: str, message: Message, form: ChatFormat) -> bool:
    """Return whether the ids equal the message's, if the format has ids. Otherwise an id must be in the text."""
    ids = tuple(item["id"] for item in message["tool_calls"])
    calls = form.calls
    has_ids = calls and (calls.id_open or calls.keys.id) and not calls.id_form and all(id in tail for id in ids)
    return read.ids == ids if has_ids else all(id is None or id in tail for id in read.ids)


def answer_text(tail: str, form: ChatFormat, turn: Turn) -> str:
    """Return the text that the model would have written, without the header and the end of the turn."""
    text = tail[len(turn.header) :] if tail.startswith(turn.header) else tail
    if turn.ending.strip() and turn.header.strip():
        text = text.replace(turn.ending.strip() + turn.header.strip(), "")  # an answer in several messages
    text = without_end_markers(text.removesuffix(turn.ending), form.literals).rstrip()
    close = form.reasoning.close.strip() if form.reasoning else ""
    return text.lstrip().removeprefix(close)  # a prompt without reasoning may end with its closing literal


def read_parts(form: ChatFormat, turn: Turn, pieces: Sequence[str]) -> list[Part]:
    """Read an answer that arrives in pieces."""
    tools = Tools({name: {"properties": SCHEMA} for name in NAMES})
    reader = AnswerReader(form, tools, form.begun(turn.header))
    return [part for piece in pieces for part in reader.read(piece)] + reader.end()


def merged(parts: Sequence[Part]) -> Read:
    """Return the parts of an answer as a whole. Arguments are JSON with sorted keys, because some templates sort them."""
    starts = [part for part in parts if isinstance(part, CallStart)]
    texts = [""] * len(starts)
    position = -1
    for part in parts:
        if isinstance(part, CallStart):
            position += 1
        elif isinstance(part, CallArguments):
            texts[position] += part.text
    calls = tuple((start.name, _canonical(text)) for start, text in zip(starts, texts, strict=True))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return Read(content.strip(), reasoning.strip(), calls, tuple(start.id for start in starts))


def expected_read(text: str, message: Message) -> Read:
    """Return how an answer must be read: what the template writes of its content and reasoning, and all its calls."""
    content = message["content"] or ""
    thought = message.get("reasoning_content") or ""
    calls = tuple(
        (item["function"]["name"], _canonical(item["function"]["arguments"])) for item in message["tool_calls"]
    )
    ids = tuple(item["id"] for item in message["tool_calls"])
    return Read(content if content in text else "", thought if thought in text else "", calls, ids)


def _canonical(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, sort_keys=True)
    except ValueError:
        return text
