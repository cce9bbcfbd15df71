"""Cut texts at the borders of markers such as <tool_call>, [TOOL_CALLS] and ```json."""

import os.path
import re

MARKER = re.compile(r"^[^<>\s]{0,80}>|<[^<>]{0,80}(?:>|$)|\[/?[A-Z][A-Z_ ]*\]|`{3}\w*")
"""A marker. Its other part may be missing at the text's beginning and end."""
COMPLETE = re.compile(r"<[^<>\s][^<>]{0,80}>|\[/?[A-Z][A-Z_ ]*\]")

MAX_MOVES = 20
"""Most moves of a cut to the borders of markers in several texts. Real templates need two."""


def common_start(first: str, *texts: str) -> str:
    """Return the longest common beginning that ends in none of the texts within a marker."""
    size = len(os.path.commonprefix([first, *texts]))
    for _ in range(MAX_MOVES):
        moved = min(_border(text, size, is_end=False) for text in (first, *texts))
        if moved == size:
            return first[:size]
        size = moved
    return ""


def common_end(first: str, *texts: str) -> str:
    """Return the longest common end that begins in none of the texts within a marker."""
    size = len(os.path.commonprefix([text[::-1] for text in (first, *texts)]))
    for _ in range(MAX_MOVES):
        moved = min(len(text) - _border(text, len(text) - size, is_end=True) for text in (first, *texts))
        if moved == size:
            return first[len(first) - size :]
        size = moved
    return ""


def _border(text: str, position: int, is_end: bool) -> int:
    """Return the border of the marker around a position; the position itself if there is none."""
    for match in MARKER.finditer(text):
        if match.start() < position < match.end():
            return match.end() if is_end else match.start()
    return position


def last_marker(text: str) -> int | None:
    """Return where the last complete marker begins."""
    return max((match.start() for match in COMPLETE.finditer(text)), default=None)


def first_marker_end(text: str) -> int | None:
    """Return where the first complete marker ends."""
    match = COMPLETE.search(text)
    return match.end() if match else None


def are_twins(opening: str, closing: str) -> bool:
    """Return whether two markers have the same word, as <think> and </think> have."""
    words = [re.sub(r"[^a-z]", "", text.lower()) for text in (opening, closing)]
    return len(os.path.commonprefix([word[::-1] for word in words])) >= 4


def without_end_markers(text: str, literals: list[str]) -> str:
    """Return a text without the markers at its end that are no part of a literal."""
    text = text.rstrip()
    for match in reversed([*COMPLETE.finditer(text)]):
        if match.end() != len(text) or any(match[0] in literal for literal in literals):
            break
        text = text[: match.start()].rstrip()
    return text
