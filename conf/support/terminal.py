"""Make untrusted text safe to print.

A terminal obeys control characters, which move the cursor, set the title or hide text.
"""

import logging
import re

# C0 without tab and newline, delete, C1, and characters that change the writing direction.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_control_chars(text: str) -> str:
    r"""Replace control characters by escapes, as in `\x1b[31m`."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_line(text: str) -> str:
    """Replace control characters as `escape_control_chars` does, and line breaks too, for text within one line."""
    return escape_control_chars(text).replace("\n", "\\n")


class EscapingFormatter(logging.Formatter):
    """A log formatter that escapes control characters: messages and tracebacks may quote a row."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_chars(super().format(record))


def log_warnings() -> None:
    """Print this process's warnings on standard error, unless logging is configured already."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
