"""Give messages with tool calls to a template in the form that it takes."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any

from models.chat.description import CallFormat
from models.chat.writer import Call, write_calls
from models.tokenizers.control_tokens import Composed

Message = dict[str, Any]
MAX_DEPTH = 64
"""Deeper arguments stay text."""
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may hold its reasoning."""


class NoContent(StrEnum):
    """The content of a message that has only calls."""

    empty = "empty"
    null = "null"
    absent = "absent"


class Ids(StrEnum):
    """The ids that calls and their results get."""

    sent = "sent"
    """The ids of the request."""
    short = "short"
    """Exactly nine letters and digits, as Mistral's templates demand."""
    counted = "counted"
    """`functions.NAME:INDEX`, as Kimi's templates repeat it: the model's ids, and others counted over the conversation."""


@dataclass(frozen=True)
class HistoryForm:
    """The form in which a template takes calls of earlier answers."""

    no_content: NoContent = NoContent.empty
    has_text_arguments: bool = False
    """Whether arguments are JSON text; otherwise they are an object."""
    ids: Ids = Ids.sent
    max_calls: int | None = None
    """1 if a message may have one call. Further calls are put into messages of their own."""
    is_flat: bool = False
    """Whether name and arguments also stand in the call itself, outside `function`."""
    drops_content: bool = False
    """Whether the template takes either content or calls, so that the content of a message with calls is left out."""
    drops_reasoning: bool = False
    """Whether the template raises for reasoning, so that it is left out."""
    written: CallFormat | None = None
    """How calls are written into the content, for a template that omits calls; None: the template writes them."""


def for_template(messages: Sequence[Message], form: HistoryForm) -> list[Message]:
    """Return a conversation in the form that the template takes.

    Messages are as in OpenAI's API. The arguments of their calls are JSON text or objects.
    """
    messages = [_without_reasoning(message) for message in messages] if form.drops_reasoning else list(messages)
    if form.max_calls == 1:
        messages = list(_one_call_each(messages))
    ids, num_calls, result = dict[str, str](), 0, []
    for message in messages:
        if message.get("role") == "tool":
            id = message.get("tool_call_id")
            result.append(message | {"tool_call_id": ids.get(id, id)} if isinstance(id, str) else message)
        elif calls := message.get("tool_calls"):
            for i, call in enumerate(calls, num_calls):
                ids[str(call.get("id"))] = _id(call, i, form.ids)
            num_calls += len(calls)
            result.append(_with_calls(message, [_call(call, ids, form) for call in calls], form))
        else:
            plain = {name: value for name, value in message.items() if name != "tool_calls"}
            result.append(plain | ({"content": ""} if plain.get("content") is None else {}))
    return result


def _without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in REASONING}


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with at most one call. The results of a call follow it."""
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            yield message
            continue
        results = []
        while position < len(messages) and messages[position].get("role") == "tool":
            results.append(messages[position])
            position += 1
        last = len(calls) - 1
        for i, call in enumerate(calls):
            first = message if i == 0 else {"role": message["role"], "content": None}
            yield first | {"tool_calls": [call]}
            matching = [result for result in results if i == last or result.get("tool_call_id") == call.get("id")]
            results = [result for result in results if result not in matching]
            yield from matching


def _id(call: Mapping[str, Any], index: int, ids: Ids) -> str:
    id = str(call.get("id"))
    if ids is Ids.counted:
        name = f"functions.{call['function']['name']}:"
        return id if re.fullmatch(rf"{re.escape(name)}\d+", id) else f"{name}{index}"
    if ids is Ids.short and not SHORT_ID.fullmatch(id):
        return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:9]
    return id


def _call(call: Mapping[str, Any], ids: Mapping[str, str], form: HistoryForm) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    function["arguments"] = _text(arguments) if form.has_text_arguments else _object(arguments)
    changed: dict[str, Any] = {**call, "function": function}
    if "id" in call:
        changed["id"] = ids[str(call["id"])]
    return changed | ({name: function[name] for name in ("name", "arguments")} if form.is_flat else {})


def _text(arguments: Any) -> str:
    return arguments or "{}" if isinstance(arguments, str | None) else json.dumps(arguments, ensure_ascii=False)


def _object(arguments: Any) -> Any:
    """Return the JSON object in a text; the text itself if a model wrote something else."""
    if not isinstance(arguments, str | None):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and _depth(arguments or "") <= MAX_DEPTH else arguments


def _depth(text: str) -> int:
    """Return the depth of a JSON text."""
    brackets = (
        1 if bracket in "{[" else -1 for bracket in re.findall(r'"(?:[^"\\]|\\.)*"|([\[\]{}])', text) if bracket
    )
    return max(accumulate(brackets), default=0)


def _with_calls(message: Message, calls: list[dict[str, Any]], form: HistoryForm) -> Message:
    content = message.get("content")
    message = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
    if form.written:
        return message | {"content": _written_content(content, calls, form.written)}
    message["tool_calls"] = calls
    if content and not form.drops_content:
        return message | {"content": content}
    match form.no_content:
        case NoContent.empty:
            return message | {"content": ""}
        case NoContent.null:
            return message | {"content": None}
        case NoContent.absent:
            return message


def _written_content(content: Any, calls: Sequence[Mapping[str, Any]], form: CallFormat) -> Composed:
    """Return the content and the calls in one text. The literals of the format may be control tokens in it."""
    texts = [content] if isinstance(content, str) and content else []

    def compose(changed: Callable[[Any], Any]) -> str:
        values = [changed(_written(call)) for call in calls]
        return "\n".join([*changed(texts), write_calls(form, [Call(**value) for value in values])])

    return Composed.of(compose)


def _written(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = _object(function["arguments"])
    return {
        "name": function["name"],
        "arguments": arguments if isinstance(arguments, dict) else {},
        "id": call.get("id"),
    }
