"""The routes of /v1/models, in the format of OpenAI's API with vLLM's fields, or in the format of Anthropic's API."""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.requests import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import Headers

from pipelines.server.api.answer_shapes import AnthropicModel, AnthropicModels, Model, Models
from pipelines.server.api.chat_format import ServedFormat
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import bad_request
from pipelines.server.api.requests import Name
from pipelines.server.engine_session import loaded
from pipelines.server.openapi import responses
from pipelines.server.service import Service


class ModelPage(BaseModel):
    """Query parameters of GET /v1/models in Anthropic's format. Clients send others, such as their version."""

    after_id: Name | None = None
    before_id: Name | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 20

    def of(self, names: list[str]) -> tuple[list[str], bool]:
        """Return the page of a list, and whether the list continues behind it. Raises ApiError (400)."""
        if self.after_id is not None and self.before_id is not None:
            raise bad_request("after_id and before_id are both given: give one", "before_id")
        for field in ("after_id", "before_id"):
            if (id := getattr(self, field)) is not None and id not in names:
                raise bad_request(f"{field}={id} is none of the list: leave it out to begin again", field)
        if self.before_id is not None:
            before = names[: names.index(self.before_id)]
            return before[-self.limit :], len(before) > self.limit
        after = names[names.index(self.after_id) + 1 :] if self.after_id is not None else names
        return after[: self.limit], len(after) > self.limit


def add_models(app: FastAPI, service: Service, chat: Chat) -> None:
    def length(name: str) -> int:
        return loaded(service.engine).with_named(*service.named(name)).context_length

    def created(name: str) -> int:
        return adapter.created if (adapter := service.adapters.find(name)) else service.created

    def described(name: str, served: ServedFormat) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created(name),
            "owned_by": "quintet",
            "root": adapter.root if (adapter := service.adapters.find(name)) else service.model_name,
            "parent": None if name == service.model_name else service.model_name,
            "max_model_len": length(name),
            "context_length": length(name),
            "chat_format": {"name": served.name, "origin": served.origin, "reason": served.reason or None},
        }

    def described_for_anthropic(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(created(name), UTC).isoformat(),
            "max_input_tokens": length(name),
            "max_tokens": length(name),
        }

    @app.get("/v1/models", response_model=Models | AnthropicModels, responses=responses(200, 400, 503))
    async def models(request: Request, page: Annotated[ModelPage, Query()]) -> JSONResponse:
        """List the model, its adapters and its soft prefixes."""
        if not _is_anthropics(request.headers):
            served = await chat.in_thread(0, lambda: chat.format)  # first, because names come and go meanwhile
            return JSONResponse({"object": "list", "data": [described(name, served) for name in service.model_names]})
        names, has_more = page.of(service.model_names)
        ids = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return JSONResponse({"data": list(map(described_for_anthropic, names)), **ids, "has_more": has_more})

    @app.get("/v1/models/{model:path}", response_model=Model | AnthropicModel, responses=responses(200, 404, 503))
    async def model(request: Request, model: str) -> JSONResponse:
        """Describe one model, adapter or soft prefix."""
        is_anthropics = _is_anthropics(request.headers)
        served = await chat.in_thread(0, lambda: chat.format)
        return JSONResponse(described_for_anthropic(model) if is_anthropics else described(model, served))


def _is_anthropics(headers: Headers) -> bool:
    """Return whether a client of Anthropic's API sends the request."""
    return "anthropic-version" in headers or ("x-api-key" in headers and "authorization" not in headers)
