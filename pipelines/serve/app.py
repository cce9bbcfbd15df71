"""The routes of the server."""

from typing import Any

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from conf.compose import version
from pipelines.api.errors import ApiError
from pipelines.api.responses import ResponseRequest
from pipelines.serve.chat import Chat
from pipelines.serve.endpoints import KINDS, add_chat, add_completions, add_embeddings, add_tokens
from pipelines.serve.exchange import loaded
from pipelines.serve.guard import Guard
from pipelines.serve.metrics import CONTENT_TYPE
from pipelines.serve.openapi import describe, responses
from pipelines.serve.responses import add_responses
from pipelines.serve.service import Service
from pipelines.serve.stream import ClientGone

CLIENT_GONE = 499  # as in nginx's logs: nobody reads this answer


def create_app(service: Service, chat: Chat, keys: dict[str, bytes]) -> ASGIApp:
    """Return the application that serves `service` to those who have one of the keys, or to all where there are none."""
    app = FastAPI(
        title="Quintet", version=version(), docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    add_errors(app)
    _add_state(app, service)
    _add_models(app, service)
    add_chat(app, service, chat)
    add_completions(app, service, chat)
    add_embeddings(app, service, chat)
    add_tokens(app, service, chat)
    add_responses(app, service, chat)

    @app.get("/openapi.json", responses=responses(200, 503))
    async def openapi() -> JSONResponse:
        """Return the description of all routes."""
        return JSONResponse(describe(app, [*KINDS, ResponseRequest], bool(keys)))

    guarded: ASGIApp = Guard(app, service, keys)
    if origins := service.config.allowed_origins:
        guarded = CORSMiddleware(guarded, origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"])
    return guarded


def add_errors(app: FastAPI) -> None:
    """Give every error OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path[:200]}"
        messages = {404: f"there is no {what}: GET /openapi.json lists what there is", 405: f"{what} is not allowed"}
        own = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), headers=error.headers)
        return JSONResponse(own.body(), own.status, own.headers)

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        own = ApiError(500, "the server failed: its log says why", "server_error")
        return JSONResponse(own.body(), own.status)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=responses(200))
    async def health() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses=responses(200, 503))
    async def ready() -> dict[str, str]:
        """Say whether requests can be answered: not while the model is loaded, and not when the server ends."""
        loaded(service.engine)
        return {"status": "ready"}

    @app.get("/version", responses=responses(200))
    async def server_version() -> dict[str, str]:
        """Return the version of Quintet."""
        return {"version": version()}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return what was measured, as Prometheus reads it."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _add_models(app: FastAPI, service: Service) -> None:
    def described(name: str) -> dict[str, Any]:
        service.adapter_of(name)
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "quintet",
            "parent": service.model_name if name in service.adapters else None,
            "max_model_len": loaded(service.engine).context_length,
        }

    @app.get("/v1/models", responses=responses(200, 503))
    async def models() -> JSONResponse:
        """List the model and its adapters."""
        return JSONResponse(
            {"object": "list", "data": [described(name) for name in (service.model_name, *service.adapters)]}
        )

    @app.get("/v1/models/{model:path}", responses=responses(200, 404, 503))
    async def model(model: str) -> JSONResponse:
        """Describe one of them."""
        return JSONResponse(described(model))
