"""The texts of a request for its span: attributes of OpenTelemetry's conventions for generative AI.

Their JSON schemas are gen-ai-input-messages.json and gen-ai-output-messages.json of
https://github.com/open-telemetry/semantic-conventions-genai
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from pydantic_core import from_json

MAX_CHARS = 65_536
"""Most characters of an attribute."""
TEXT = {"text": "content", "reasoning": "content", "tool_call": "arguments", "tool_call_response": "response"}
"""The field of a part that holds its text, by the part's type."""

Object: TypeAlias = dict[str, Any]


class TracedTexts:
    """Collects the conversation and the answers of one request."""

    def __init__(self) -> None:
        self._instructions = ""
        self._conversation: Sequence[Object] = ()
        self._pieces: dict[int, list[tuple[Object, list[str]]]] = {}
        """The parts of each choice without their text, and the pieces of the text."""
        self._finish: dict[int, str] = {}

    def ask(self, conversation: Sequence[Object], has_instructions: bool = False) -> None:
        """Set the conversation, in the format of chat templates. `has_instructions`: whether its first message has the
        instructions that the API takes separately."""
        if has_instructions:
            self._instructions, conversation = conversation[0]["content"], conversation[1:]
        self._conversation = conversation

    def add(self, index: int, deltas: Iterable[Object]) -> None:
        """Add deltas of the message of a choice."""
        for delta in deltas:
            for name, kind in (("reasoning_content", "reasoning"), ("content", "text")):
                if text := delta.get(name):
                    self._add_piece(index, {"type": kind}, text)
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    part = {"type": "tool_call", "id": call["id"], "name": call["function"]["name"]}
                    self._pieces.setdefault(index, []).append((part, []))
                parts = self._pieces[index]
                next(pieces for part, pieces in reversed(parts) if part["type"] == "tool_call").append(
                    call["function"]["arguments"]
                )

    def _add_piece(self, index: int, part: Object, text: str) -> None:
        parts = self._pieces.setdefault(index, [])
        if not parts or parts[-1][0] != part:
            parts.append((part, []))
        parts[-1][1].append(text)

    def end(self, index: int, finish_reason: str) -> None:
        """Set the finish reason of a choice, by its name in OpenAI's API."""
        self._finish[index] = "tool_call" if finish_reason == "tool_calls" else finish_reason

    def attributes(self) -> Iterator[tuple[str, str]]:
        """Yield the names and values of the span's attributes. A value is JSON of at most MAX_CHARS characters.

        The last messages of a longer conversation are kept.
        """
        if self._instructions:
            (message,) = _fitted([{"parts": [{"type": "text", "content": self._instructions}]}])
            yield "gen_ai.system_instructions", _dumps(message["parts"])
        if self._conversation:
            newest_first = ({"role": message["role"], "parts": _parts(message)} for message in self._conversation[::-1])
            yield "gen_ai.input.messages", _dumps(_fitted(newest_first)[::-1])
        if answers := [self._answer(index) for index in sorted(self._pieces.keys() | self._finish.keys())]:
            yield "gen_ai.output.messages", _dumps(_fitted(answers))

    def _answer(self, index: int) -> Object:
        parts = [_with_text(part, "".join(pieces)) for part, pieces in self._pieces.get(index, [])]
        return {"role": "assistant", "parts": parts, "finish_reason": self._finish.get(index, "error")}


def _parts(message: Object) -> list[Object]:
    """Return the parts of a message in the format of chat templates."""
    content = message.get("content")
    if message["role"] == "tool":
        return [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content or ""}]
    texts = ("reasoning", message.get("reasoning_content")), ("text", content)
    calls = [({"type": "tool_call", "id": call["id"]}, call["function"]) for call in message.get("tool_calls", [])]
    return [{"type": kind, "content": text} for kind, text in texts if text] + [
        _with_text(part | {"name": function["name"]}, function["arguments"]) for part, function in calls
    ]


def _with_text(part: Object, text: str) -> Object:
    return part | {TEXT[part["type"]]: _arguments(text) if part["type"] == "tool_call" else text}


def _arguments(text: str) -> Any:
    """Return the arguments of a call as a JSON value; unchanged if they are not valid JSON, for example because the
    answer was cut."""
    try:
        value = from_json(text, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # raises ValueError for a number that is too large for a float
    except ValueError:
        return text
    return value


def _fitted(messages: Iterable[Object]) -> list[Object]:
    """Return the first messages, as many as MAX_CHARS characters of JSON hold. The text of the last one may be cut."""
    kept, room = list[Object](), MAX_CHARS - len("[]")
    for message in messages:
        parts, room = list[Object](), room - len(_dumps({**message, "parts": []})) - len(",")
        for part in message["parts"]:
            size = len(_dumps(part)) + len(",")
            if size > room:
                parts += _cut(part, room - len(","))
                return [*kept, {**message, "parts": parts}] if parts else kept
            parts.append(part)
            room -= size
        if room < 0:
            break
        kept.append({**message, "parts": parts})
    return kept


def _cut(part: Object, room: int) -> list[Object]:
    """Return the part with as much of its text as `room` characters of JSON hold; nothing if they hold none."""
    field = TEXT[part["type"]]
    text = part[field] if isinstance(part[field], str) else _dumps(part[field])
    sizes = range(min(len(text), max(0, room)) + 1)
    size = bisect_right(sizes, room, key=lambda size: len(_dumps({**part, field: text[:size]}))) - 1
    return [{**part, field: text[:size]}] if size > 0 else []


def _dumps(value: Any) -> str:
    """Return JSON. Half a surrogate pair, which a collector cannot read, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()
