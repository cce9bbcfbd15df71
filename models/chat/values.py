"""Readers of arguments: JSON, the values of Gemma's calls, and Python calls. Each passes JSON text to a sink."""

import ast
import json
import re
from collections.abc import Iterable
from typing import Any

from models.chat.stream import Reading, Sink, TextStream

MAX_DEPTH = 64
MAX_PYTHON = 1 << 20
"""Most characters of a Python call."""

IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
OUTSIDE_STRING = re.compile(r'[^"{}\[\]<]+')
SCALAR = re.compile(r"[^\s,}\]<;]+")
KEYWORD = re.compile(r"\w[\w.-]*")
BEHIND_STRING = tuple(",)]}:'\"")
"""Characters that may follow a Python string."""
JSON_CONSTANTS = {"true": True, "false": False, "null": None}


class Malformed(Exception):
    """Text that is not a call."""


def read_json_string(stream: TextStream, sink: Sink, limit: int | None = None) -> Reading[bool]:
    """Pass the rest of a JSON string, behind its opening quote, to `sink`. Return whether it is closed.

    Control characters, which JSON forbids, become escapes. A string of more than `limit` characters is not closed.
    """
    size = 0
    while char := (yield from stream.peek()):
        if match := IN_STRING.match(stream.text, stream.position):
            size += len(match[0])
            if limit is not None and size > limit:
                return False
            sink(match[0])
            stream.position = match.end()
        elif char == "\\":
            while len(stream.text) - stream.position < 2:
                if stream.is_complete:
                    return False
                yield
            sink(stream.text[stream.position : stream.position + 2])
            stream.position += 2
        else:
            sink(char if char == '"' else json.dumps(char)[1:-1])
            stream.position += 1
            if char == '"':
                return True
    return False


def read_json_value(stream: TextStream, sink: Sink) -> Reading[bool]:
    """Pass a JSON value to `sink`, as it is written. Return whether it is complete: it ends at `<` outside a string.

    Raises Malformed for a bracket that closes none of its kind.
    """
    closers: list[str] = []
    while char := (yield from stream.peek()):
        if char == '"':
            stream.position += 1
            sink(char)
            if not (yield from read_json_string(stream, sink)):
                return False
        elif char in "{}[]":
            if char in "{[":
                closers.append("}" if char == "{" else "]")
            elif not closers or closers.pop() != char:
                raise Malformed
            stream.position += 1
            sink(char)
        elif closers:
            if not (match := OUTSIDE_STRING.match(stream.text, stream.position)):
                return False
            sink(match[0])
            stream.position = match.end()
            continue
        else:
            return (yield from _read_scalar(stream, sink))
        if not closers:
            return True
    return False


def _read_scalar(stream: TextStream, sink: Sink) -> Reading[bool]:
    """Pass a number or a constant to `sink`. Return whether what follows ends it."""
    text = ""
    while match := SCALAR.match(stream.text, stream.position):
        text += match[0]
        stream.position = match.end()
        if not (yield from stream.peek()):
            break
    if not text:
        raise Malformed
    sink(text)
    return not stream.is_complete or stream.position < len(stream.text)


def closing_brackets(text: str) -> str:
    """Return the brackets that complete a JSON text; "" if they alone do not complete it."""
    stack: list[str] = []
    in_string = False
    for match in re.finditer(r'\\.|["{}\[\]]', text, re.DOTALL):
        if match[0] == '"':
            in_string = not in_string
        elif not in_string and match[0] in "{[":
            stack.append("}" if match[0] == "{" else "]")
        elif not in_string and match[0] in "}]" and stack:
            stack.pop()
    closers = "".join(reversed(stack))
    return closers if closers and is_json(text + closers) else ""


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def json_of(value: Any) -> str:
    """Return a value as JSON text. Raises Malformed for what JSON cannot hold."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:  # a set, a NaN, half a surrogate pair
        raise Malformed from error
    return text


def json_of_literal(text: str) -> str:
    """Return a bare value as JSON: null, true, a number, JSON or a Python literal; anything else is a string."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_refuse)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json_of(literal_value(ast.parse(text, mode="eval").body))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, Malformed):
        return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def literal_value(node: ast.AST, depth: int = 0) -> Any:
    """Return the value of a Python literal, in which the constants of JSON may occur. Nothing is evaluated."""
    if depth > MAX_DEPTH:
        raise Malformed
    if isinstance(node, ast.Name) and node.id in JSON_CONSTANTS:
        return JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal_value(item, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:  # **mapping
            raise Malformed
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): literal_value(value, depth + 1) for key, value in pairs if key}
    return ast.literal_eval(node)


def read_gemma_object(stream: TextStream, quote: str, sink: Sink, depth: int = 0) -> Reading[bool]:
    """Pass the object `{key:value,...}` to `sink`. Keys are bare or quoted. Return whether it is complete."""
    if depth > MAX_DEPTH or not (yield from stream.take("{")):
        raise Malformed
    sink("{")
    separator = ""
    while True:
        yield from stream.skip(" \t\r\n,")
        if not (char := (yield from stream.peek())):
            return False
        if char == "}":
            stream.position += 1
            sink("}")
            return True
        key: list[str] = []
        if not (yield from stream.until((":",), key.append, 256)):
            return False
        sink(separator + json.dumps("".join(key).strip().replace(quote, "").strip('"'), ensure_ascii=False) + ": ")
        separator = ", "
        if not (yield from _read_gemma_value(stream, quote, sink, depth + 1)):
            return False


def _read_gemma_value(stream: TextStream, quote: str, sink: Sink, depth: int) -> Reading[bool]:
    yield from stream.skip()
    if (yield from stream.take(quote)):
        sink('"')
        closed = yield from stream.until((quote,), lambda text: sink(json.dumps(text, ensure_ascii=False)[1:-1]))
        if closed:
            sink('"')
        return bool(closed)
    char = yield from stream.peek()
    if char == "{":
        return (yield from read_gemma_object(stream, quote, sink, depth))
    if char == "[":
        return (yield from _read_gemma_list(stream, quote, sink, depth))
    if char == '"':
        return (yield from read_json_value(stream, sink))
    parts: list[str] = []
    while (char := (yield from stream.peek())) and char not in ",}]":
        parts.append(char)
        stream.position += 1
    sink(json_of_literal("".join(parts).replace(quote, "")))
    return bool(char)


def _read_gemma_list(stream: TextStream, quote: str, sink: Sink, depth: int) -> Reading[bool]:
    if depth > MAX_DEPTH:
        raise Malformed
    stream.position += 1
    sink("[")
    separator = ""
    while True:
        yield from stream.skip(" \t\r\n,")
        if not (char := (yield from stream.peek())):
            return False
        if char == "]":
            stream.position += 1
            sink("]")
            return True
        sink(separator)
        separator = ", "
        if not (yield from _read_gemma_value(stream, quote, sink, depth + 1)):
            return False


def read_python_arguments(stream: TextStream) -> Reading[str]:
    """Return the keyword arguments of a Python call, from its opening bracket, as a JSON object.

    LFM2.5's template escapes no quotes, so a quote within a string is text unless something follows that may follow a
    string.
    """
    pieces: list[list[str]] = []
    depth, quote = 0, ""
    for _ in range(MAX_PYTHON):
        if not (char := (yield from stream.peek())):
            break
        stream.position += 1
        if quote and char == "\\":
            escaped = yield from stream.peek()
            stream.position += len(escaped)
            char += escaped
        elif quote and char in "\n\r":
            char = repr(char)[1:-1]
        elif char == quote:
            is_end = yield from stream.comes_after_space(BEHIND_STRING)
            quote, char = ("", char) if is_end else (quote, f"\\{char}")
        elif not quote and char in "'\"":
            quote = char
        elif not quote:
            depth += (char in "([{") - (char in ")]}")
        if depth == 0 and not quote:
            if char != ")":
                break
            return _python_arguments(map("".join, pieces))
        if depth == 1 and not quote and char in ("(", ","):
            pieces.append([])
        elif pieces:
            pieces[-1].append(char)
    raise Malformed


def _python_arguments(texts: Iterable[str]) -> str:
    """Return keyword arguments as a JSON object. Names may be words of Python, such as `from`."""
    arguments: dict[str, Any] = {}
    try:
        for text in filter(str.strip, texts):
            name, _, value = text.partition("=")
            if not KEYWORD.fullmatch(name.strip()) or name.strip() in arguments:
                raise Malformed
            (argument,) = literal_value(ast.parse(f"[{value}]", mode="eval").body)
            arguments[name.strip()] = argument
        return json_of(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed from error
