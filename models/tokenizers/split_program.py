"""Compile the split patterns of tokenizers for a program without regular expressions and without Unicode tables.

A class such as `\\p{L}` becomes the code points that the tokenizer's library matches, so its Unicode version applies. A
program is a list of instructions. Jump targets are always later instructions:

    ["set", S]                      one character of set S
    ["run", S, least, most, mode]   `least` to `most` (-1: unlimited) characters of set S;
                                    `mode`: as many or as few as possible
    ["fork", A, B]                  continue at instruction A; if that fails, at B
    ["jump", A]                     continue at instruction A
    ["ahead", wanted, A]            test whether the next instructions, up to their ["match"], match here;
                                    if the result is `wanted`, continue at A
    ["match"]                       the pattern matches up to here
"""

import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from tokenizers import Regex, pre_tokenizers

from conf.errors import UserError

Ranges = tuple[int, ...]
"""Code points: first and last of each range, in order."""
TESTED = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000)]
"""Code points that Unicode versions define. The ranges between and after them are unassigned or private use."""
ALIKE = {0x40000: 0xDFFFF, 0xE1000: 0xEFFFF, 0xF0000: 0x10FFFF}
GREEDY, LAZY, POSSESSIVE = "greedy", "lazy", "possessive"
MODES = {"": GREEDY, "?": LAZY, "+": POSSESSIVE}
ESCAPED_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
QUANTIFIER = re.compile(r"(?:([?*+])([?+]?)|\{(\d+)(,(\d*))?\}(\??))")
COUNTS = {"?": (0, 1), "*": (0, -1), "+": (1, -1)}
ESCAPED_CLASS = re.compile(r"\\(?:[pP]\{[^{}]*\}|[sSdDwW])")
ESCAPED_CODE = re.compile(r"\\(?:x\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2}))")
MOST_COPIES = 16  # of a group with a count


class Sets:
    """The character sets of a tokenizer's programs, without duplicates."""

    def __init__(self, members: Callable[..., Ranges]) -> None:
        """`members`: the function `members` for the library that reads the patterns."""
        self.ranges: list[Ranges] = []
        self._members = members

    def number(self, ranges: Ranges) -> int:
        if ranges not in self.ranges:
            self.ranges.append(ranges)
        return self.ranges.index(ranges)

    def of_pattern(self, pattern: str) -> int:
        return self.number(self._members(pattern))

    def of_code(self, code: int, ignores_case: bool) -> int:
        if not ignores_case or chr(code) not in _cased():
            return self.number((code, code))
        return self.number(self._members(f"(?i:{chr(code)})", _cased()))


def compile_text(text: str, sets: Sets) -> list[list[Any]]:
    return [*(["set", sets.number((ord(letter), ord(letter)))] for letter in text), ["match"]]


def compile_pattern(pattern: str, sets: Sets) -> list[list[Any]]:
    """Return the program of a regular expression.

    Raises UserError for unsupported syntax, and if it can match an empty text.
    """
    reader = _Reader(pattern, sets)
    code, is_empty = reader.alternatives(ignores_case=False)
    if reader.rest:
        raise reader.refuse(reader.rest[:20])
    if is_empty:
        raise reader.refuse("a match of no characters")
    return _with_absolute_targets([*code, ("match",)])


Code = list[tuple[Any, ...]]
"""Instructions with targets relative to their own position."""


class _Reader:
    """Parses Oniguruma syntax from left to right. Each method returns code, and whether it may match no characters."""

    def __init__(self, pattern: str, sets: Sets) -> None:
        self.rest = self._pattern = pattern
        self._sets = sets

    def refuse(self, construct: str) -> UserError:
        return UserError(f"its pattern {self._pattern[:80]!r} has {construct!r}")

    def alternatives(self, ignores_case: bool) -> tuple[Code, bool]:
        code, is_empty = self._sequence(ignores_case)
        branches, empties = [code], [is_empty]
        while self._take("|"):
            code, is_empty = self._sequence(ignores_case)
            branches.append(code)
            empties.append(is_empty)
        joined = branches.pop()
        for branch in reversed(branches):
            joined = [("fork", 1, len(branch) + 2), *branch, ("jump", len(joined) + 1), *joined]
        return joined, any(empties)

    def _sequence(self, ignores_case: bool) -> tuple[Code, bool]:
        code: Code = []
        is_empty = True
        while self.rest and self.rest[0] not in "|)":
            item, item_is_empty = self._quantified(*self._item(ignores_case))
            code += item
            is_empty &= item_is_empty
        return code, is_empty

    def _item(self, ignores_case: bool) -> tuple[Code, bool]:
        if match := self._match(r"\(\?(?::|i:)|\((?!\?)"):
            code, is_empty = self.alternatives(ignores_case or match == "(?i:")
        elif match := self._match(r"\(\?[=!]"):
            inner, _ = self.alternatives(ignores_case)
            code, is_empty = [("ahead", match == "(?=", len(inner) + 2), *inner, ("match",)], True
        elif self._take("$"):  # end of a line or of the text
            return [("ahead", False, 3), ("set", self._sets.of_pattern(r"[^\n]")), ("match",)], True
        else:
            return [("set", self._set(ignores_case))], False
        if not self._take(")"):
            raise self.refuse("a group without end")
        return code, is_empty

    def _quantified(self, item: Code, is_empty: bool) -> tuple[Code, bool]:
        match = QUANTIFIER.match(self.rest)
        if not match:
            return item, is_empty
        self.rest = self.rest[match.end() :]
        sign, mode, first, has_comma, last, mode_of_count = match.groups()
        least, most = COUNTS[sign] if sign else (int(first), int(last or -1) if has_comma else int(first))
        mode = MODES[mode if sign else mode_of_count]
        if QUANTIFIER.match(self.rest) or (not sign and not has_comma and mode_of_count):
            raise self.refuse(f"{match[0]}{self.rest[:1]}")
        if len(item) == 1 and item[0][0] == "set":
            return [("run", item[0][1], least, most, mode)], least == 0
        if is_empty or mode != GREEDY or not 0 <= most <= MOST_COPIES:
            raise self.refuse(f"a group with {match[0]}")
        optional: Code = []
        for _ in range(most - least):
            optional = [("fork", 1, len(item) + len(optional) + 1), *item, *optional]
        return [*(item * least), *optional], least == 0

    def _set(self, ignores_case: bool) -> int:
        if self.rest.startswith("["):
            text = self._class_text()
        elif match := ESCAPED_CODE.match(self.rest):
            self.rest = self.rest[match.end() :]
            return self._sets.of_code(int(next(filter(None, match.groups())), 16), ignores_case)
        elif match := ESCAPED_CLASS.match(self.rest):
            self.rest = self.rest[match.end() :]
            text = match[0]
        elif self._take("."):
            text = r"[^\n]"
        elif match := re.match(r"\\([nrtfv0]|[^\w\s])", self.rest):
            self.rest = self.rest[match.end() :]
            return self._sets.of_code(ord(ESCAPED_CONTROLS.get(match[1], match[1])), ignores_case)
        elif self.rest[0] in r"\^?*+{()":
            raise self.refuse(self.rest[:3])
        else:
            letter, self.rest = self.rest[0], self.rest[1:]
            return self._sets.of_code(ord(letter), ignores_case)
        return self._sets.of_pattern(f"(?i:{text})" if ignores_case else text)

    def _class_text(self) -> str:
        depth = 0
        for match in re.finditer(r"\\.|[\[\]]", self.rest, re.DOTALL):
            depth += {"[": 1, "]": -1}.get(match[0], 0)
            if depth == 0:
                text, self.rest = self.rest[: match.end()], self.rest[match.end() :]
                return text
        raise self.refuse("a class without end")

    def _take(self, text: str) -> bool:
        is_next = self.rest.startswith(text)
        self.rest = self.rest.removeprefix(text)
        return is_next

    def _match(self, pattern: str) -> str:
        match = re.match(pattern, self.rest)
        self.rest = self.rest[match.end() :] if match else self.rest
        return match[0] if match else ""


def _with_absolute_targets(code: Code) -> list[list[Any]]:
    """Return code with absolute targets."""
    targets = {"fork": (1, 2), "jump": (1,), "ahead": (2,)}
    return [
        [value + at if i in targets.get(instruction[0], ()) else value for i, value in enumerate(instruction)]
        for at, instruction in enumerate(code)
    ]


@lru_cache(maxsize=64)
def members(pattern: str, tested: str | None = None) -> Ranges:
    """Return the code points that `tokenizers` (Oniguruma) matches with a pattern of one character.

    `tested`: candidate characters; None: all.
    """
    cut = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    return ranges_of("".join(pieces_of(cut, all_tested() if tested is None else tested)))


def pieces_of(cut: Any, text: str) -> list[str]:
    return [piece for piece, _ in cut.pre_tokenize_str(text)]


@cache
def all_tested() -> str:
    """Return TESTED and one code point of each range in ALIKE, in order."""
    return "".join(map(chr, [*TESTED, *ALIKE]))


@cache
def _cased() -> str:
    return "".join(letter for letter in all_tested() if {letter} != {letter.lower(), letter.upper(), letter.casefold()})


def ranges_of(letters: str) -> Ranges:
    """Return the ranges of all code points that the tested `letters` represent."""
    ranges: list[list[int]] = []
    for code in sorted({*map(ord, letters)}):
        last = ALIKE.get(code, code)
        if ranges and code in (ranges[-1][1] + 1, 0xE000 if ranges[-1][1] == 0xD7FF else None):
            ranges[-1][1] = last
        else:
            ranges.append([code, last])
    return tuple(code for first_and_last in ranges for code in first_and_last)
