"""The parts of an answer, and their writer."""

from dataclasses import dataclass
from typing import TypeAlias

from models.chat.special_tokens import unquoted
from models.chat.stream import SPACE


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


class PartWriter:
    """Collects parts. White space around content and reasoning is dropped where another part begins."""

    def __init__(self, is_trimmed: bool) -> None:
        """`is_trimmed`: white space at the beginning of every answer is dropped."""
        self._parts: list[Part] = []
        self._space = ""
        self._drops_space = is_trimmed
        self._last: type[Content] | type[Reasoning] | None = None

    @property
    def at_line_start(self) -> bool:
        return self._drops_space or self._space.endswith("\n") or self._last is None

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def begin_part(self) -> None:
        """Drop the white space before and behind this place."""
        self._space, self._drops_space = "", True

    def begin_call(self, name: str, id: str | None) -> None:
        self.begin_part()
        self._parts.append(CallStart(name, id))

    def arguments(self, text: str) -> None:
        text, last = unquoted(text), self._parts[-1] if self._parts else None
        if isinstance(last, CallArguments):
            self._parts[-1] = CallArguments(last.text + text)
        elif text:
            self._parts.append(CallArguments(text))

    def end(self) -> None:
        """Add the white space at the end of content."""
        if self._last is not Reasoning and self._space and not self._drops_space:
            self._append(Content, self._space)
        self._space = ""

    def _add(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Add text. White space at its end waits for the next text."""
        text = self._space + unquoted(text)
        if self._drops_space:
            text = text.lstrip(SPACE)
        stripped = text.rstrip(SPACE)
        self._space = text[len(stripped) :]
        if stripped:
            self._drops_space = False
            self._append(kind, stripped)

    def _append(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        self._last = kind
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        else:
            self._parts.append(kind(text))
