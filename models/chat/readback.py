"""Read renderings of a template back, to show that a description fits it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.chat.calls import Tools
from models.chat.cuts import without_end_markers
from models.chat.description import ChatFormat
from models.chat.history import HistoryForm, Message
from models.chat.needles import USER, Renderings, answer, call, call_id, tool, user
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
TOOLS = [tool(name, SCHEMA) for name in ("get_weather", "stop")]
VALUES = {
    "city": "Pa\"r'is \\ n\n<b> 北京",
    "sure": True,
    "none": None,
    "nested": {"a": [1, {"b": "x, y}"}], "c": False},
    "list": ["q]", "z"],
    "share": -1.5,
    "digits": "37",
}
CONTENT, THOUGHT = "Let me see.", "The user asks.\nI look."
CALLS = [call("get_weather", VALUES, 0), call("stop", {}, 1), call("stop", {"city": "Rome"}, 2)]


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
    return all(
        _reads(text, message, form, turn) for text, message in written_answers(renderings, history)
    ) and bool(written_answers(renderings, history))


def written_answers(renderings: Renderings, history: HistoryForm) -> list[tuple[str, Message]]:
    """Return answers with calls, and the text of each behind the user's message. Refused ones are left out."""
    groups = [[item] for item in CALLS] if history.max_calls == 1 else [CALLS]
    messages = [answer(None, calls) for calls in groups]
    messages.append(answer(CONTENT, groups[0], THOUGHT))
    texts = [renderings.behind(USER, [user(), message], history, tools=TOOLS) for message in messages]
    is_first_written = texts[0] is not None
    pairs = zip(texts, messages, strict=True)
    return [(text, message) for text, message in pairs if text is not None] if is_first_written else []


def _reads(tail: str, message: Message, form: ChatFormat, turn: Turn) -> bool:
    text = answer_text(tail, form, turn)
    read = merged(read_parts(form, turn, [text]))
    expected = expected_read(text, message)
    return (read.content, read.calls) == (expected.content, expected.calls) and (
        read.reasoning == expected.reasoning and all(id in (None, want) for id, want in zip(read.ids, expected.ids))
    )


def answer_text(tail: str, form: ChatFormat, turn: Turn) -> str:
    """Return the text that the model would have written, without the header and the end of the turn."""
    text = tail[len(turn.header) :] if tail.startswith(turn.header) else tail
    return without_end_markers(text.removesuffix(turn.ending), form.literals).rstrip()


def begun(form: ChatFormat, prompt: str) -> str:
    """Return the literal with which a prompt begins the answer."""
    return next((literal for literal in form.beginnings if prompt.rstrip().endswith(literal.strip())), "")


def read_parts(form: ChatFormat, turn: Turn, pieces: Sequence[str]) -> list[Part]:
    """Read an answer that arrives in pieces."""
    parameters: Mapping[str, Any] = {item["function"]["name"]: item["function"]["parameters"] for item in TOOLS}
    reader = AnswerReader(form, Tools(parameters), begun(form, turn.header))
    return [part for piece in pieces for part in reader.read(piece)] + reader.end()


def merged(parts: Sequence[Part]) -> Read:
    """Return the parts of an answer as a whole. Arguments are canonical JSON, in the order of the text."""
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
        return json.dumps(json.loads(text), ensure_ascii=False)
    except ValueError:
        return text
