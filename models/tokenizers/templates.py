"""Render a checkpoint's chat template, untrusted Jinja, in a sandbox with the names that transformers provides.

`template_process.py` runs this file as a program, so it imports none of our modules.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may hold its reasoning. Templates read the first two."""


def render(template: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """Return the conversation as text. Raises any exception of a faulty or hostile template.

    `variables`: other template variables, such as tools, bos_token and add_generation_prompt. A template may change
    lists inside messages and variables: give copies.
    """
    present = [
        _with_reasoning({key: value for key, value in message.items() if value is not None or key == "content"})
        for message in messages
    ]
    return _compiled(template).render(**{"documents": None, **variables, "messages": present})


def names(template: str) -> list[str]:
    """Return the variables that a template reads and does not set."""
    return sorted(meta.find_undeclared_variables(_environment().parse(template)))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


@lru_cache
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@lru_cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters |= {"tojson": _to_json, "from_json": json.loads}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
        "dict": _Dictionaries(),
        "namespace": _Namespace,
    }
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, in which lists may change: Kimi K2's template keeps the ids of calls in a list of its own.

    Messages and variables are parsed for one rendering, so that a change of a list ends with the rendering.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_change = type(obj) is list and attr in ("append", "extend", "insert", "pop")
        return is_change or super().is_safe_attribute(obj, attr, value)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's text for training. Renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Dictionaries:
    """`dict` without its class attributes, through which a template could leave the sandbox."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """`namespace` that rejects names with a leading underscore, such as Python's introspection attributes."""

    def __init__(*arguments: Any, **named: Any) -> None:  # as in Jinja, so that an attribute may be called self
        self, *positional = arguments
        attributes = dict(*positional, **named)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        Namespace.__setitem__(self, name, value)


def _check_attribute(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a chat template cannot set the attribute {name!r} of a namespace")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Jinja's own filter would escape HTML characters. What `map` yields becomes a list."""
    value = list(value) if isinstance(value, Iterator) else value
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def serve(cpu_s: float, memory: int, max_characters: int) -> None:
    """Read JSON lines with a function name and arguments from standard input. Answer each with its result or an error.

    SIGPROF ends the process when a line takes more than `cpu_s` seconds of CPU time.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = _answer(request, max_characters + 4 * len(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _answer(request: list[Any], max_characters: int) -> bytes:
    kind, *arguments = request
    try:
        if kind == "names":
            return json.dumps({"names": names(*arguments)}).encode()
        text = render(*arguments)
        if len(text) > max_characters:
            raise ValueError(f"it writes {len(text)} characters, more than {max_characters}")
        return json.dumps({"text": text}, ensure_ascii=False).encode()
    except Exception as error:  # the template's raise_exception, or any error of its Jinja
        return json.dumps({"error": " ".join(str(error).split()) or type(error).__name__}).encode()


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
