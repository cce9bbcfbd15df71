"""Special tokens in the text of an answer: some are removed, and text that spells a marker is told from the marker."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from models.chat.stream import literal_set

QUOTE = "\ufdd0"
"""Inserted into text that spells a special token, so that the reader does not take it for one. Unicode reserves it."""
TOLERANCE = 4
"""Bytes by which a token's text may come earlier than its place, because decoders drop spaces."""


class Vocabulary(NamedTuple):
    """Special tokens of a chat format, and the sizes of all tokens."""

    markers: Mapping[int, str]
    """Texts of the special tokens of a chat format, by id."""
    num_bytes: Callable[[int], int]
    """Returns the number of bytes that a token adds to the text."""


class SpecialTokens:
    """Filters the special tokens in a text that arrives in pieces."""

    def __init__(self, dropped: Iterable[str], vocabulary: Vocabulary | None) -> None:
        """`dropped`: texts to remove."""
        removed = frozenset(dropped)
        self._markers = frozenset(vocabulary.markers.values()) - removed if vocabulary else frozenset()
        self._vocabulary = vocabulary
        self._texts = literal_set(tuple(sorted(removed | self._markers)))
        self._held = ""
        self._num_text_bytes = self._num_token_bytes = 0
        self._places: dict[str, list[int]] = {}
        """Byte offsets of the special tokens whose text has not arrived, by text."""

    def read(self, text: str, token_ids: Sequence[int] = ()) -> str:
        """Return the text that is certain. An end that may begin a special token is held.

        `token_ids`: the next tokens. They may be ahead of the text.
        """
        for id in token_ids if self._vocabulary else ():
            self._note(id)
        text = self._held + text
        size = len(text) - self._texts.held(text)
        self._held = text[size:]
        return self._filtered(text[:size])

    def end(self) -> str:
        held, self._held = self._held, ""
        return held

    def _note(self, id: int) -> None:
        assert self._vocabulary
        if (marker := self._vocabulary.markers.get(id)) is not None:
            self._places.setdefault(marker, []).append(self._num_token_bytes)
        self._num_token_bytes += self._vocabulary.num_bytes(id)

    def _filtered(self, text: str) -> str:
        parts: list[str] = []
        position = 0
        for match in self._texts.pattern.finditer(text):
            parts.append(text[position : match.start()])
            self._num_text_bytes += len(parts[-1].encode("utf-8", "surrogatepass"))
            if match[0] in self._markers:
                parts.append(self._marker(match[0]))
            position = match.end()
        self._num_text_bytes += len(text[position:].encode("utf-8", "surrogatepass"))
        return "".join([*parts, text[position:]])

    def _marker(self, text: str) -> str:
        """Return the text of a marker: changed, unless it is the next special token with this text."""
        places = self._places.get(text, [])
        if self._num_token_bytes and not (places and places[0] <= self._num_text_bytes + TOLERANCE):
            self._num_text_bytes += len(text.encode("utf-8", "surrogatepass"))
            return text[:1] + QUOTE + text[1:]
        if places:
            self._num_text_bytes = places.pop(0)
        self._num_text_bytes += len(text.encode("utf-8", "surrogatepass"))
        return text


def unquoted(text: str) -> str:
    """Return text as the model wrote it."""
    return text.replace(QUOTE, "") if QUOTE in text else text
