"""Control characters are shown escaped wherever a terminal would interpret them."""

import logging
import unicodedata

from conf.support.terminal import EscapingFormatter, escape_control_chars, escape_line
from tests.helpers.cases import each

OBEYED = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cc"]
TURNS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}  # Unicode Annex 9
DIRECTIONS = [chr(code) for code in range(0x110000) if unicodedata.bidirectional(chr(code)) in TURNS]


def test_every_control_character_is_shown_and_nothing_else_is_changed() -> None:
    for character in {*OBEYED, *DIRECTIONS} - {"\n", "\t"}:
        escape = escape_control_chars(character)
        assert escape.isascii()
        assert escape.isprintable()
        assert escape.encode().decode("unicode_escape") == character
    text = "".join(chr(code) for code in range(0x20, 0x3000) if not {chr(code)} & {*OBEYED, *DIRECTIONS}) + "\n\t今🙂"
    assert escape_control_chars(text) == text
    assert len(OBEYED) == 65
    assert len(DIRECTIONS) == 9


def test_an_escaped_line_has_no_line_break() -> None:
    assert escape_line("a\nb\x1b[2J\r") == r"a\nb\x1b[2J\r"


@each("value", ["a\x1b]0;title\x07", "a\u202eb"])
def test_messages_that_are_logged_are_visible(value: str) -> None:
    record = logging.LogRecord("name", logging.WARNING, "", 0, "row %s", (value,), None)
    assert (
        EscapingFormatter("%(levelname)s: %(message)s").format(record) == f"WARNING: row {escape_control_chars(value)}"
    )
