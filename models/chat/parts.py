"""The parts of an answer."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning text."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a tool call."""

    name: str
    id: str | None = None
    """The model's id of the call, in formats that have one and whose templates repeat it."""


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of the last call. The sum of the pieces is a JSON object, unless the answer was cut."""

    text: str


Part: TypeAlias = Content | Reasoning | CallStart | CallArguments
