"""Lines of an event stream, from the bytes as they come. Source: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

import re

END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR that comes last may be half of CRLF


class EventLines:
    """Lines end at CR, LF or CRLF alone: U+2028, U+2029 and U+0085 stand in texts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, content: bytes) -> list[str]:
        """Return the lines that end in this part of a stream. Raises UnicodeDecodeError for what is not UTF-8."""
        *lines, self._rest = END.split(self._rest + content)
        return [line.decode() for line in lines]
