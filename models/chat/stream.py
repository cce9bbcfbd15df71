"""Text that arrives in pieces, and the primitives that read it.

A primitive is a generator. It yields where it needs more text, and returns its result. So a reader is written like one
of the complete text, and its result does not depend on how the text is cut into pieces.
"""

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""A read of a value of type T that waits for text."""
Sink: TypeAlias = Callable[[str], None]
"""Takes the next piece of a text."""

SPACE = " \t\r\n"


class TextStream:
    """The text that is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_complete = False
        """Whether no more text arrives."""
        self._mark: int | None = None

    def add(self, text: str) -> None:
        keep = self.position if self._mark is None else self._mark
        self.text = self.text[keep:] + text
        self.position -= keep
        self._mark = None if self._mark is None else 0

    def mark(self, num_back: int = 0) -> None:
        """Keep the text from `num_back` characters before this position, for `reset`."""
        self._mark = self.position - num_back

    def unmark(self) -> None:
        self._mark = None

    def reset(self) -> int:
        """Go back to the mark. Return the number of characters."""
        if self._mark is None:
            return 0
        size = self.position - self._mark
        self.position, self._mark = self._mark, None
        return size

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self.position == len(self.text):
            if self.is_complete:
                return ""
            yield
        return self.text[self.position]

    def skip(self, characters: str = SPACE) -> Reading[None]:
        while (char := (yield from self.peek())) and char in characters:
            self.position += 1

    def take(self, literal: str) -> Reading[bool]:
        """Read a literal if it comes next. Return whether it does."""
        comes_next = yield from self.comes(literal)
        self.position += len(literal) * comes_next
        return comes_next

    def comes(self, literal: str, offset: int = 0) -> Reading[bool]:
        """Return whether a literal comes `offset` characters after this position."""
        while True:
            start = self.position + offset
            ahead = self.text[start : start + len(literal)]
            if ahead == literal:
                return bool(literal)
            if self.is_complete or not literal.startswith(ahead):
                return False
            yield

    def comes_after_space(self, literals: Iterable[str]) -> Reading[bool]:
        """Return whether one of the literals, or the end of the text, comes next behind white space."""
        size = 0
        while True:
            if (start := self.position + size) == len(self.text):
                if self.is_complete:
                    return True
                yield
            elif self.text[start] in SPACE:
                size += 1
            else:
                break
        for literal in literals:
            if (yield from self.comes(literal, size)):
                return True
        return False

    def until(self, literals: tuple[str, ...], sink: Sink, limit: int | None = None) -> Reading[str]:
        """Pass the text before the first of the literals to `sink`, and read the literal too.

        Returns the literal; "" at the end of the text, and after `limit` characters. Of literals that begin at one
        place the longest counts.
        """
        wanted = literal_set(literals)
        passed = 0
        while True:
            match = wanted.pattern.search(self.text, self.position)
            stop = match.start() if match else len(self.text)
            if not self.is_complete:
                stop -= 0 if match else wanted.held(self.text, self.position)
            may_grow = match is not None and not self.is_complete and self.text[stop:] in wanted.prefixes
            if limit is not None and passed + stop - self.position > limit:
                stop = self.position + limit - passed
                sink(self.text[self.position : stop])
                self.position = stop
                return ""
            passed += stop - self.position
            if stop > self.position:
                sink(self.text[self.position : stop])
                self.position = stop
            if match and not may_grow:
                self.position += len(match[0])
                return match[0]
            if self.is_complete:
                return ""
            yield


class LiteralSet:
    """Literals to search for."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        longest_first = sorted(filter(None, literals), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.prefixes = frozenset(literal[:size] for literal in literals for size in range(1, len(literal)))
        """The proper beginnings of the literals."""
        self._longest = max(map(len, literals), default=1) - 1
        first = "".join({literal[0] for literal in longest_first if len(literal) > 1})
        self._beginning = re.compile(f"[{re.escape(first)}]" if first else "(?!)")

    def held(self, text: str, start: int = 0) -> int:
        """Return the length of the longest end of a text, from `start`, that may begin a literal."""
        for match in self._beginning.finditer(text, max(start, len(text) - self._longest)):
            if text[match.start() :] in self.prefixes:
                return len(text) - match.start()
        return 0


@lru_cache(1024)
def literal_set(literals: tuple[str, ...]) -> LiteralSet:
    return LiteralSet(literals)
