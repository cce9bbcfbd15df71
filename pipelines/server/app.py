"""The application: all routes, the error handlers, and the guard in front of the routes."""

import functools
import json
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from conf.compose import version
from pipelines.server.adapter_routes import BODIES, add_adapters
from pipelines.server.api.batches import BatchRequest
from pipelines.server.api.conversation import Chat
from pipelines.server.batch_routes import LineSender, add_batches, add_files
from pipelines.server.batches.jobs import BatchJobs
from pipelines.server.error_handlers import add_errors
from pipelines.server.guard import NO_KEYS, Guard
from pipelines.server.model_routes import add_models
from pipelines.server.openapi import describe, responses
from pipelines.server.responses.background import KeptResponses
from pipelines.server.responses.routes import add_responses
from pipelines.server.routes import ROUTES, add_routes
from pipelines.server.service import Service
from pipelines.server.state_routes import add_state


def create_app(
    service: Service,
    chat: Chat,
    keys: Mapping[str, bytes],
    jobs: BatchJobs | None = None,
    admins: Mapping[str, bytes] = NO_KEYS,
) -> ASGIApp:
    """Return the application that serves `service`. Requests need one of `keys`, unless `keys` is empty.

    `jobs`: batches and files. None disables their routes. `admins`: as for Guard.
    """
    app = FastAPI(
        title="Quintet", version=version(), docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    add_errors(app)
    add_state(app, service)
    add_models(app, service, chat)
    kept = KeptResponses(service, chat, service.response_store) if service.response_store else None
    add_routes(app, service, chat, kept)
    if kept is not None:
        add_responses(app, kept)
    add_adapters(app, service)
    if jobs is not None:
        jobs.send = LineSender(service, chat)
        add_files(app, jobs, service.config.send_timeout_s)
        add_batches(app, jobs)

    @functools.cache
    def description() -> bytes:
        bodies = (route.kind for route in ROUTES.values())
        return json.dumps(describe(app, [*bodies, BatchRequest, *BODIES], bool(keys))).encode()

    @app.get("/openapi.json", responses=responses(200, 503))
    async def openapi() -> Response:
        """Return this OpenAPI description."""
        return Response(description(), media_type="application/json")

    guarded: ASGIApp = Guard(app, service, keys, admins)
    if origins := service.config.allowed_origins:
        guarded = CORSMiddleware(guarded, origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"])
    return guarded
