"""The routes of stored responses."""

from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.requests import Request
from fastapi.responses import Response

from pipelines.server.api import answer_shapes
from pipelines.server.api.batches import listed
from pipelines.server.api.response_requests import InputPage, NoQuery
from pipelines.server.openapi import responses
from pipelines.server.records import Record
from pipelines.server.responses.background import KeptResponses, json_response


def add_responses(app: FastAPI, kept: KeptResponses) -> None:
    """Add the routes of stored responses. A key sees only its own responses."""
    path = "/v1/responses/{response_id}"

    @app.get(path, response_model=answer_shapes.ResponseAnswer, responses=responses(200, 400, 404, 503))
    async def response(request: Request, response_id: str, query: Annotated[NoQuery, Query()]) -> Response:
        """Return a stored or running response."""
        return json_response((await kept.get(_owner(request), response_id)).response)

    @app.delete(path, response_model=answer_shapes.ResponseDeleted, responses=responses(200, 404, 503))
    async def remove(request: Request, response_id: str) -> Response:
        """Delete a response. A running one is cancelled."""
        await kept.remove(_owner(request), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post(
        f"{path}/cancel", response_model=answer_shapes.ResponseAnswer, responses=responses(200, 400, 404, 415, 503)
    )
    async def cancel(request: Request, response_id: str) -> Response:
        """Cancel a background response."""
        return json_response(await kept.cancel(_owner(request), response_id))

    @app.get(f"{path}/input_items", response_model=answer_shapes.InputItems, responses=responses(200, 400, 404, 503))
    async def input_items(request: Request, response_id: str, page: Annotated[InputPage, Query()]) -> Response:
        """List the input items of a response, also the items of the responses that it continues."""
        items = (await kept.get(_owner(request), response_id)).items
        return json_response(listed(items if page.order == "asc" else items[::-1], page.after, page.limit))


def _owner(request: Request) -> str | None:
    record: Record = request.state.record
    return record.key
