"""Parse tool calls in a model's text: JSON, and Python keyword arguments for ChatGLM3. Nothing is evaluated."""

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
KIMI_ID = re.compile(r"functions\.(.+):[0-9]+")
FENCE = "```"


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    """The model's id of the call, in formats that have one and whose templates repeat it."""


def read_json_call(text: str) -> list[ToolCall] | None:
    """Return the call in `{"name": ..., "arguments": {...}}`, None for anything else."""
    return _calls([_json(text)])


def read_json_calls(text: str) -> list[ToolCall] | None:
    """Return consecutive call objects in Llama 3's format: with "parameters", and semicolons between them."""
    return _calls(list(_objects(text)))


def read_mistral_calls(text: str) -> list[ToolCall] | None:
    """Return calls in Mistral's formats: a list of objects, or `NAME[ARGS]{...}`.

    In the second format [TOOL_CALLS] is before each call except the first.
    """
    if text.lstrip().startswith("["):
        listed = _json(text)
        return _calls(listed) if isinstance(listed, list) else None
    calls = []
    for call in text.split("[TOOL_CALLS]"):
        name, _, arguments = call.partition("[ARGS]")
        calls.append({"name": name.partition("[CALL_ID]")[0].strip(), "arguments": _json(arguments)})
    return _calls(calls)


def read_deepseek_calls(text: str) -> list[ToolCall] | None:
    """Return calls in DeepSeek's formats.

    DeepSeek-V3 and R1 write `function<sep>NAME` and fenced JSON, V3.1 writes `NAME<sep>JSON`.
    """
    begin, end = DEEPSEEK_CALL
    calls = []
    for call in text.split(begin)[1:]:
        first, _, second = call.partition(end)[0].partition(DEEPSEEK_SEPARATOR)
        if first.strip() == "function" and FENCE in second:
            name, _, fenced = second.partition(FENCE)
            calls.append({"name": name.strip(), "arguments": _json(fenced.removeprefix("json").rpartition(FENCE)[0])})
        else:
            calls.append({"name": first.strip(), "arguments": _json(second)})
    return _calls(calls)


def read_kimi_calls(text: str) -> list[ToolCall] | None:
    """Return calls in Kimi's format: `functions.NAME:NUMBER`, which is the call's id, and JSON."""
    begin, end = KIMI_CALL
    ids, values = [], []
    for call in text.split(begin)[1:]:
        id, _, arguments = call.partition(end)[0].partition(KIMI_SEPARATOR)
        match = KIMI_ID.fullmatch(id.strip())
        ids.append(id.strip())
        values.append({"name": match and match[1], "arguments": _json(arguments)})
    calls = _calls(values)
    return calls and [replace(call, id=id) for call, id in zip(calls, ids, strict=True)]


def read_named_json_call(text: str) -> list[ToolCall] | None:
    """Return the call in GLM-4's format: a name, and a JSON object on the next line."""
    name, _, arguments = text.strip().partition("\n")
    return _calls([{"name": name.strip(), "arguments": _json(arguments)}])


def read_named_python_call(text: str) -> list[ToolCall] | None:
    """Return the call in ChatGLM3's format: a name, and below it a fenced `tool_call(argument=literal, ...)`."""
    name, _, fenced = text.strip().partition("\n")
    code = fenced.strip().removeprefix(f"{FENCE}python").removesuffix(FENCE)
    with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        call = ast.parse(code.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or getattr(call.func, "id", None) != "tool_call":
            return None
        if any(keyword.arg is None for keyword in call.keywords):  # **mapping
            return None
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return _calls([{"name": name.strip(), "arguments": arguments}])
    return None


def _calls(values: list[Any]) -> list[ToolCall] | None:
    """Return the calls in JSON values; None if any value is not a call."""
    calls = []
    for value in values:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            (name + text).encode()
        except (TypeError, ValueError, RecursionError):  # not JSON, half a surrogate pair
            return None
        calls.append(ToolCall(name, text))
    return calls or None


def _json(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _objects(text: str) -> Iterator[Any]:
    """Yield the values of consecutive JSON texts; None for invalid text."""
    text = text.strip().rstrip(";")
    while text:
        try:
            value, size = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            value, size = None, len(text)
        yield value
        text = text[size:].lstrip(" \t\r\n;")
