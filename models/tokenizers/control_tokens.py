"""Prevent texts of a conversation that spell a control token, such as <|im_end|>, from becoming this token.

The texts are marked before a template writes them, and encoded as plain text afterwards, as in transformers'
sanitize_control_tokens. The marks are characters that the conversation does not contain, so they change nothing else.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from conf.errors import UserError

PRIVATE_USE = range(0xE000, 0xF900)  # characters without an assigned meaning


class Composed(str):
    """A text of literals, which may become control tokens, and of values, which may not."""

    compose: Callable[[Callable[[Any], Any]], str]
    """Returns the text, for a function that changes the values."""

    @classmethod
    def of(cls, compose: Callable[[Callable[[Any], Any]], str]) -> "Composed":
        text = cls(compose(lambda value: value))
        text.compose = compose
        return text


class ControlTokens:
    """The control tokens of a template's conversations: all special tokens, and other tokens in the template."""

    def __init__(self, names: Mapping[str, bool], template: str) -> None:
        """`names`: texts of the tokens that `encode` recognises, and whether each is special."""
        self._template = template
        self.special = _any_of(name for name, is_special in names.items() if is_special)
        known = [name for name, is_special in names.items() if is_special or _writes(template, name)]
        self.known = _any_of(known)
        self._in_json = _any_of(_json(name)[1:-1] for name in known)

    @staticmethod
    def of(names: Mapping[str, bool], template: str) -> "ControlTokens":
        """Return the tokens of a tokenizer and a template.

        The latest results are cached, because each conversation needs them.
        """
        return _control_tokens(tuple(names.items()), template)

    def marks(self, values: object) -> "Marks | None":
        """Return marks for the tokens that `values` spell; None if they spell none.

        Raises UserError if they contain all private use characters.
        """
        text = _json(values)
        if not self._in_json.search(text):
            return None
        text = (text + self._template).lower()
        unused = [chr(code) for code in PRIVATE_USE if chr(code) not in text and f"\\u{code:x}" not in text]
        if len(unused) < 2:
            raise UserError("the messages contain all private-use characters: leave some of them out")
        return Marks(self, unused[0], unused[1])


class Marks:
    """Two characters that enclose spelled control tokens, to find them in the rendered text."""

    def __init__(self, tokens: ControlTokens, begin: str, end: str) -> None:
        self._tokens, self._begin, self._end = tokens, begin, end

    def put(self, value: Any, is_answer: bool = False) -> Any:
        """Return a text, or a container of texts, with marks around control tokens.

        `is_answer`: the model wrote it. Then only special tokens are marked, because templates search answers for
        <think> and similar.
        """
        names = self._tokens.special if is_answer else self._tokens.known
        return _replaced(value, lambda text: names.sub(f"{self._begin}\\g<0>{self._end}", text))

    def split(self, text: str) -> list[str]:
        """Return the parts of a rendered text without marks. Every second part must be encoded as plain text."""
        for mark in (self._begin, self._end):
            text = text.replace(f"\\u{ord(mark):x}", mark)  # the form in ASCII JSON
        names = self._tokens.known.pattern
        # A mark without its partner, which a template cut off, still ends a part: the two sides must not join to a
        # name.
        parts = re.split(f"{self._begin}({names}){self._end}|[{self._begin}{self._end}]", text)
        return [part or "" for part in parts]


def joined_runs(parts: list[str], cut: Callable[[str], Iterable[str | int]]) -> Iterator[str | int]:
    """Yield the texts between control tokens, and the ids of these tokens, from `cut`. `parts`: from `Marks.split`."""
    run = ""
    for i, part in enumerate(parts):
        for piece in [part] if i % 2 else cut(part):
            if isinstance(piece, int):
                yield from (run, piece) if run else (piece,)
                run = ""
            else:
                run += piece
    if run:
        yield run


@lru_cache(maxsize=16)
def _control_tokens(names: tuple[tuple[str, bool], ...], template: str) -> ControlTokens:
    return ControlTokens(dict(names), template)


def _writes(template: str, name: str) -> bool:
    """Return whether a template writes a token. Alphanumeric names and spaces do not count: every template has them."""
    return name in template and not name.isalnum() and not name.isspace()


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _json(values: object) -> str:
    return json.dumps(values, ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:
    if isinstance(value, Composed):
        return value.compose(lambda part: _replaced(part, replace))
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, dict):
        return {_replaced(key, replace): _replaced(item, replace) for key, item in value.items()}
    return [_replaced(item, replace) for item in value] if isinstance(value, list | tuple) else value
