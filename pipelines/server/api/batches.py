"""Requests of /v1/files and /v1/batches, and the lines of a batch's files."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.server.api.errors import bad_request
from pipelines.server.api.requests import Name, Shape


class ExpiresAfter(Shape):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2592000)]


class FileRequest(Shape):
    """The fields of POST /v1/files, without the file."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class BatchRequest(Shape):
    """The body of POST /v1/batches."""

    input_file_id: Name
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class BatchPage(BaseModel):
    """Query parameters of GET /v1/batches."""

    model_config = ConfigDict(extra="forbid")

    after: Name | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FilePage(BaseModel):
    """Query parameters of GET /v1/files."""

    model_config = ConfigDict(extra="forbid")

    after: Name | None = None
    limit: Annotated[int, Field(ge=1, le=10000)] = 10000
    order: Literal["asc", "desc"] = "desc"
    purpose: Literal["batch", "batch_output"] | None = None


def listed(items: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """Return the page of a list after the object with id `after`. Raises ApiError (400) if this id is unknown."""
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise bad_request(f"after={after} is none of the list: leave it out to begin again", "after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


def answer_line(id: str, custom_id: str | int | None, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Return a line of a batch's output or error file: the answer to the input line with this `custom_id`."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": id, "custom_id": custom_id, "response": response, "error": None}


def error_line(id: str, custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Return a line of a batch's error file for an input line that was not run."""
    return {"id": id, "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}
