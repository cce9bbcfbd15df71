"""Lines of an event stream, from its bytes as they arrive.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import re

END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the end may be half of CRLF


class EventLines:
    """Splits a stream at CR, LF and CRLF only. U+2028, U+2029 and U+0085 are part of a text."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, content: bytes) -> list[str]:
        """Return the lines that end in this part of a stream. Raises UnicodeDecodeError for invalid UTF-8."""
        *lines, self._rest = END.split(self._rest + content)
        return [line.decode() for line in lines]
