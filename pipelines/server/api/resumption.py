"""Cursors that resume a dropped stream. The answer is computed again, and the part that the client has is left out."""

import re
from dataclasses import dataclass

from pipelines.server.api.errors import ApiError, bad_request

HEADER = "Last-Event-ID"
PLACE = re.compile(
    r"(?P<fingerprint>[\w-]{1,128})\.(?P<seed>[0-9]{1,20})\.(?P<had>[0-9]{1,9}:[0-9]{1,9}(-[0-9]{1,9}:[0-9]{1,9})*)"
)


@dataclass(frozen=True)
class StreamCursor:
    """The position up to which a client has received a stream.

    Its text form is an event id: `fingerprint.seed.tokens:characters-...`.
    """

    fingerprint: str
    seed: int
    had: tuple[tuple[int, int], ...]
    """For each choice: the number of received tokens, and the number of characters that these tokens complete."""

    def __str__(self) -> str:
        return f"{self.fingerprint}.{self.seed}.{'-'.join(f'{tokens}:{chars}' for tokens, chars in self.had)}"


def read_cursor(text: str, fingerprint: str | None, num_choices: int, seed: int | None) -> StreamCursor:
    """Return the cursor that a client sends.

    `fingerprint`: the server's. `seed`: the request's, or None.

    Raises ApiError: 400 if the cursor is invalid or belongs to another request, 412 if this server would not reproduce
    the answer.
    """
    match = PLACE.fullmatch(text)
    if match is None or int(match["seed"]) >= 2**64:
        raise bad_request(f"{HEADER} is not an event id of this server: send an empty header to get ids", HEADER)
    pairs = (pair.split(":") for pair in match["had"].split("-"))
    cursor = StreamCursor(
        match["fingerprint"], int(match["seed"]), tuple((int(tokens), int(chars)) for tokens, chars in pairs)
    )
    if cursor.fingerprint != fingerprint:
        message = f"the stream came from {cursor.fingerprint}, and this server is {fingerprint}: send the request again"
        raise ApiError(412, message, param=HEADER, code="fingerprint_mismatch")
    if len(cursor.had) != num_choices or seed not in (None, cursor.seed):
        raise bad_request(f"{HEADER} is of another request: send the same body", HEADER)
    return cursor
