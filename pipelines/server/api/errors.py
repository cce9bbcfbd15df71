"""Errors in the format of OpenAI's API: status, message, type, and the field of the request that caused the error."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from conf.errors import shortened

BAD_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


ANTHROPIC = "/v1/messages"  # prefix of the paths whose errors have Anthropic's format
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


SCHEMA_OF_TOOL = r"(tools\[\d+\])\.function\.parameters"
"""Matches the location of a tool's argument schema in a chat request. Messages and `param` contain this location."""


class ApiError(Exception):
    """An error response. `param` is the request's field in API notation, such as `messages[0].content`."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.splitlines())  # a name of the request may have line breaks
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON body in the format of the API that has this path."""
        if path.startswith(ANTHROPIC):
            kind = ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """Return the error with the field names of another API. `names`: the other API's name by chat request field."""
        name = re.split(r"\W", self.param or "")[0]
        message = self.message.replace(name, names[name]) if name in names else self.message
        message = re.sub(r"\b(\w+)(?=[=[])", lambda match: names.get(match[1], match[1]), message)
        param = names.get(name, self.param)
        if schema := names.get(SCHEMA_OF_TOOL):
            message = re.sub(SCHEMA_OF_TOOL, rf"\1.{schema}", message)
            param = param and re.sub(SCHEMA_OF_TOOL, rf"\1.{schema}", param)
        return ApiError(self.status, message, self.type, param, self.code, self.headers)


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Raise the block's errors with the field names of another API, as `ApiError.renamed` does."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from error


def failed() -> ApiError:
    """Return the error for an unexpected exception."""
    return ApiError(500, "the server failed: its log says why", SERVER_ERROR)


def draining() -> ApiError:
    """Return the error of a server that is shutting down."""
    message = "the server is shutting down: send the request to another server"
    return ApiError(503, message, SERVER_ERROR, code="draining", headers={"connection": "close"})


def loading() -> ApiError:
    """Return the error of a server whose model is not yet loaded."""
    message = "the model is still loading: send the request again"
    return ApiError(503, message, SERVER_ERROR, code="loading", headers={"retry-after": "1"})


def engine_gone(reason: object, status: int) -> ApiError:
    """Return the error for an engine that ended before the answer was complete."""
    return ApiError(status, str(reason), SERVER_ERROR, code="engine_gone", headers={"retry-after": "1"})


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """Return the error of status 400 for an invalid or unsupported field."""
    return ApiError(400, message, BAD_REQUEST, param, code)


def too_long(num_tokens: int | str, limit: int | None, param: str) -> ApiError:
    """Return the error of status 400 for a prompt that leaves no room for an answer."""
    # litellm and LangChain recognize this error by its first words
    message_start = f"this model's maximum context length is {limit} tokens"
    message = f"{message_start} for prompt and answer together, and the prompt has {num_tokens} tokens: shorten it"
    return bad_request(message, param, "context_length_exceeded")


def not_allowed(param: str, value: object, remedy: str) -> ApiError:
    """Return the error of status 400 for a value that is not allowed."""
    return bad_request(f"{param}={_shown(value)} is not allowed: {remedy}", param)


def _shown(value: object) -> str:
    try:
        return shortened(repr(value))
    except RecursionError:
        return "(JSON of too many levels)"
