"""Read calls of tools from what models write: JSON, and keyword arguments of Python for ChatGLM3. Nothing is evaluated."""

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
    """A tool that the model calls."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    """What the model calls it, in formats where it does, and where templates repeat that."""


def read_json_call(text: str) -> list[ToolCall] | None:
    """Return the call of `{"name": ..., "arguments": {...}}`, None for anything else."""
    return _calls([_json(text)])


def read_json_calls(text: str) -> list[ToolCall] | None:
    """Return calls, one object after the other, as Llama 3 writes them: with "parameters", and semicolons between."""
    return _calls(list(_objects(text)))


def read_mistral_calls(text: str) -> list[ToolCall] | None:
    """Return calls in Mistral's formats: a list of objects, or `NAME[ARGS]{...}`, with [TOOL_CALLS] before each but the first."""
    if text.lstrip().startswith("["):
        listed = _json(text)
        return _calls(listed) if isinstance(listed, list) else None
    calls = []
    for call in text.split("[TOOL_CALLS]"):
        name, _, arguments = call.partition("[ARGS]")
        calls.append({"name": name.partition("[CALL_ID]")[0].strip(), "arguments": _json(arguments)})
    return _calls(calls)


def read_deepseek_calls(text: str) -> list[ToolCall] | None:
    """Return calls in the formats of DeepSeek-V3 and R1, `function<sep>NAME` and fenced JSON, and of V3.1, `NAME<sep>JSON`."""
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
    """Return calls in Kimi's format, `functions.NAME:NUMBER` and JSON, whose first part is the id of the call."""
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
    """Return the call of GLM-4, a name and a line below it a JSON object."""
    name, _, arguments = text.strip().partition("\n")
    return _calls([{"name": name.strip(), "arguments": _json(arguments)}])


def read_named_python_call(text: str) -> list[ToolCall] | None:
    """Return the call of ChatGLM3, a name and below it, fenced, `tool_call(argument=literal, ...)`."""
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
    """Return the calls that JSON values are; None where one of them is none."""
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
        except (TypeError, ValueError, RecursionError):  # no JSON, half a surrogate pair
            return None
        calls.append(ToolCall(name, text))
    return calls or None


def _json(text: str) -> Any:
    """Return the value of a JSON text, None where it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _objects(text: str) -> Iterator[Any]:
    """Yield the values of JSON texts one after the other; None for what is none."""
    text = text.strip().rstrip(";")
    while text:
        try:
            value, size = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            value, size = None, len(text)
        yield value
        text = text[size:].lstrip(" \t\r\n;")
