"""Places in streams, by which a dropped one goes on: the answer is computed again, and what the client has is left out."""

import re
from dataclasses import dataclass

from pipelines.api.errors import ApiError, bad_request

HEADER = "Last-Event-ID"
PLACE = re.compile(
    r"(?P<fingerprint>[\w-]{1,128})\.(?P<seed>[0-9]{1,20})\.(?P<had>[0-9]{1,9}:[0-9]{1,9}(-[0-9]{1,9}:[0-9]{1,9})*)"
)


@dataclass(frozen=True)
class StreamCursor:
    """The end of what a client has of a stream. As a text it is the id of an event: `fingerprint.seed.tokens:characters-...`."""

    fingerprint: str
    seed: int
    had: tuple[tuple[int, int], ...]
    """Of each choice the number of its tokens, and that of the characters that they made certain."""

    def __str__(self) -> str:
        return f"{self.fingerprint}.{self.seed}.{'-'.join(f'{tokens}:{chars}' for tokens, chars in self.had)}"


def read_cursor(text: str, fingerprint: str | None, num_choices: int, seed: int | None) -> StreamCursor:
    """Return the place that a client names.

    fingerprint: the server's. seed: the request's own, if it gives one.

    Raises ApiError: 400 for what is no place of this request, 412 where this server would not give the same answer again.
    """
    found = PLACE.fullmatch(text)
    if found is None or int(found["seed"]) >= 2**64:
        raise bad_request(f"{HEADER} is no id of an event of this server: send an empty one to get ids", HEADER)
    pairs = (pair.split(":") for pair in found["had"].split("-"))
    cursor = StreamCursor(
        found["fingerprint"], int(found["seed"]), tuple((int(tokens), int(chars)) for tokens, chars in pairs)
    )
    if cursor.fingerprint != fingerprint:
        message = f"the stream came from {cursor.fingerprint}, and this server is {fingerprint}: send the request anew"
        raise ApiError(412, message, param=HEADER, code="fingerprint_mismatch")
    if len(cursor.had) != num_choices or seed not in (None, cursor.seed):
        raise bad_request(f"{HEADER} is of another request: send the same body", HEADER)
    return cursor
