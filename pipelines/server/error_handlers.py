"""Converts the exceptions of routes to responses in the format of the path's API."""

from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pipelines.server.api.errors import ApiError, failed
from pipelines.server.api.validation import validation_error
from pipelines.server.guard import error_response
from pipelines.server.stream import ClientGone

CLIENT_GONE = 499  # nginx's status for a client that has disconnected


def add_errors(app: FastAPI) -> None:
    """Add the handlers of all exceptions. Each response has the format of the API that the path belongs to."""

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
