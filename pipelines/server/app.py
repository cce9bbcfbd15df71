"""The application: all routes, the error handlers, and the guard around them."""

import functools
import json
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from conf.compose import version
from pipelines.server.api.answer_shapes import Model, Models, Status, Version
from pipelines.server.api.batches import BatchRequest
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import ApiError, failed
from pipelines.server.api.requests import Shape
from pipelines.server.api.validation import validation_error
from pipelines.server.batch_routes import LineSender, add_batches, add_files
from pipelines.server.batches.jobs import BatchJobs
from pipelines.server.engine_session import loaded
from pipelines.server.guard import Guard, error_response
from pipelines.server.metrics import CONTENT_TYPE
from pipelines.server.openapi import describe, responses
from pipelines.server.routes import ROUTES, add_routes
from pipelines.server.service import Service
from pipelines.server.stream import ClientGone

CLIENT_GONE = 499  # nginx's status for a client that has disconnected


def create_app(service: Service, chat: Chat, keys: dict[str, bytes], jobs: BatchJobs | None = None) -> ASGIApp:
    """Return the application that serves `service`. Requests need one of `keys`, unless `keys` is empty.

    `jobs`: batches and files. None disables their routes.
    """
    app = FastAPI(
        title="Quintet", version=version(), docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    add_errors(app)
    _add_state(app, service)
    _add_models(app, service)
    add_routes(app, service, chat)
    if jobs is not None:
        jobs.send = LineSender(service, chat)
        add_files(app, jobs, service.config.send_timeout_s)
        add_batches(app, jobs)

    @functools.cache
    def description() -> bytes:
        kinds: list[type[Shape]] = [*(route.kind for route in ROUTES.values()), BatchRequest]
        return json.dumps(describe(app, kinds, bool(keys))).encode()

    @app.get("/openapi.json", responses=responses(200, 503))
    async def openapi() -> Response:
        """Return this OpenAPI description."""
        return Response(description(), media_type="application/json")

    guarded: ASGIApp = Guard(app, service, keys)
    if origins := service.config.allowed_origins:
        guarded = CORSMiddleware(guarded, origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"])
    return guarded


def add_errors(app: FastAPI) -> None:
    """Return every error in the shape of the API that the path belongs to."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def bad_query(request: Request, error: RequestValidationError) -> Response:
        errors = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
        return await refused(request, validation_error(errors, dict(request.query_params), {}))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        route = f"{request.method} {request.url.path[:200]}"
        messages = {
            400: f"the form is not allowed: {error.detail}",  # of an upload form
            404: f"there is no {route}: GET /openapi.json lists what there is",
            405: f"{route} is not allowed",
        }
        message = messages.get(error.status_code, HTTPStatus(error.status_code).phrase)
        return await refused(request, ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return await refused(request, failed())


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=responses(200))
    async def health() -> Status:
        """Report that the HTTP process is alive."""
        return Status(status="ok")

    @app.get("/ready", responses=responses(200, 503))
    async def ready() -> Status:
        """Report whether the server accepts requests: the model is loaded and the server is not shutting down."""
        loaded(service.engine)
        return Status(status="ready")

    @app.get("/version", responses=responses(200))
    async def server_version() -> Version:
        """Return the version of Quintet."""
        return Version(version=version())

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _add_models(app: FastAPI, service: Service) -> None:
    def described(name: str) -> dict[str, Any]:
        prefix = service.named(name).prefix
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "quintet",
            "parent": None if name == service.model_name else service.model_name,
            "max_model_len": loaded(service.engine).after(prefix).context_length,
        }

    @app.get("/v1/models", response_model=Models, responses=responses(200, 503))
    async def models() -> JSONResponse:
        """List the model, its adapters and its soft prefixes."""
        return JSONResponse({"object": "list", "data": [described(name) for name in service.model_names]})

    @app.get("/v1/models/{model:path}", response_model=Model, responses=responses(200, 404, 503))
    async def model(model: str) -> JSONResponse:
        """Describe one model, adapter or soft prefix."""
        return JSONResponse(described(model))
