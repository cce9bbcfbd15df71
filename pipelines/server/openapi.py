"""The OpenAPI description: FastAPI's, extended by the request bodies of pipelines.server.api and the error responses."""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pipelines.server.api.answer_shapes import AnswerShape
from pipelines.server.api.errors import ANTHROPIC
from pipelines.server.api.requests import Shape

OF_ALL = (400, 401, 421, 431, 500, 503)  # statuses of the guard and of unhandled errors
OF_BODIES = (404, 413, 415, 429, 504)
SCHEMAS = "#/components/schemas/{model}"


class ErrorContent(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorContent


class AnthropicErrorContent(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every error of /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorContent


def responses(*statuses: int, media: str = "application/json") -> dict[int | str, dict[str, Any]]:
    """Return the `responses` argument of a route's decorator. `media`: media type of successful responses."""
    return {
        status: {
            "description": "An answer" if status < 400 else "An error",
            "content": {media if status < 400 else "application/json": {}},
        }
        for status in statuses
    }


def takes(kind: type[Shape], shape: type[AnswerShape], *further: int) -> dict[str, Any]:
    """Return decorator arguments for a route that reads a body of type `kind` and responds with `shape`.

    `further`: additional statuses.
    """
    body = {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": SCHEMAS.format(model=kind.__name__)}}},
    }
    answers = responses(200, *OF_BODIES, *further)
    if "stream" in kind.model_fields:
        answers[200]["content"]["text/event-stream"] = {}
    return {"response_model": shape, "responses": answers, "openapi_extra": {"requestBody": body}}


def describe(app: FastAPI, kinds: list[type[Shape]], has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document. `kinds`: types of the request bodies. `has_keys`: whether API keys are required."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's schemas for status 422
        schemas.pop(unused, None)
    bodies: list[type[BaseModel]] = [*kinds, ErrorBody, AnthropicErrorBody]
    schemas |= models_json_schema([(kind, "validation") for kind in bodies], ref_template=SCHEMAS)[1].get("$defs", {})
    for path, operations in document["paths"].items():
        shape = SCHEMAS.format(model="AnthropicErrorBody" if path.startswith(ANTHROPIC) else "ErrorBody")
        error = {"description": "An error", "content": {"application/json": {"schema": {"$ref": shape}}}}
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            for status in OF_ALL:
                if status != 401 or has_keys:
                    answers.setdefault(str(status), error)
            for status in answers:
                if int(status) >= 400:
                    answers[status] = error
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document
