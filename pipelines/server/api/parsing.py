"""Parses request bodies into checked objects. An invalid body raises a one-line error that names the field."""

import json
from typing import TypeVar

from pydantic import ValidationError

from pipelines.server.api.errors import bad_request
from pipelines.server.api.requests import UNSUPPORTED, Shape
from pipelines.server.api.validation import validation_error

S = TypeVar("S", bound=Shape)


def parse_request(kind: type[S], content: bytes) -> S:
    """Return a body as a checked request. Raises ApiError (400) in one line, with the field to blame."""
    constants = list[str]()  # NaN and infinities, which Python accepts and JSON forbids

    def read_constant(name: str) -> float:
        constants.append(name)
        return float(name)

    try:
        body = json.loads(content.decode(), parse_constant=read_constant)
        if b"\\u" in content:
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad_request("the body has half a surrogate pair: give whole characters", None) from error
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}", None) from error
    request = check_request(kind, body)
    if constants:
        raise bad_request(f"the body is not JSON: {constants[0]} is no number", None)
    return request


def check_request(kind: type[S], body: object) -> S:
    """Return decoded JSON as a checked request. Raises ApiError (400) in one line, with the field to blame."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), body, UNSUPPORTED) from error
