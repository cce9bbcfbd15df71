"""The routes that tell the state of the server."""

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from conf.compose import version
from pipelines.server.api.answer_shapes import Status, Version
from pipelines.server.engine_session import loaded
from pipelines.server.metrics import CONTENT_TYPE
from pipelines.server.openapi import responses
from pipelines.server.service import Service


def add_state(app: FastAPI, service: Service) -> None:
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
