"""Cut texts at the borders of markers such as <tool_call>, [TOOL_CALLS] and ```json."""

import os.path
import re

MARKER = re.compile(r"^[^<>\s]{0,80}>|<[^<>]{0,80}(?:>|$)|\[/?[A-Z][A-Z_ ]*\]|`{3}\w*")
"""A marker. Its other part may be missing at the text's beginning and end."""
COMPLETE = re.compile(r"<[^<>\s][^<>]{0,80}>|\[/?[A-Z][A-Z_ ]*\]")


def common_start(first: str, *texts: str) -> str:
    """Return the longest common beginning that ends in none of the texts within a marker."""
    size = len(os.path.commonprefix([first, *texts]))
    while size and (moved := min(_border(text, size, is_end=False) for text in (first, *texts))) < size:
        size = moved
    return first[:size]


def common_end(first: str, *texts: str) -> str:
    """Return the longest common end that begins in none of the texts within a marker."""
    size = len(os.path.commonprefix([text[::-1] for text in (first, *texts)]))
    while size:
        moved = min(len(text) - _border(text, len(text) - size, is_end=True) for text in (first, *texts))
        if moved == size:
            break
        size = moved
    return first[len(first) - size :]


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
    while (start := last_marker(text.rstrip())) is not None:
        marker = text.rstrip()[start:]
        if COMPLETE.fullmatch(marker) is None or any(marker in literal for literal in literals):
            break
        text = text[:start]
    return text
