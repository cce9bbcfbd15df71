"""Responses that run without a connection: `background=true` of /v1/responses."""

import asyncio
import logging
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message

from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import SERVER_ERROR, ApiError, bad_request, failed, not_allowed, renamed_errors
from pipelines.server.api.response_requests import NAMES, ResponseRequest
from pipelines.server.api.responses import ResponseWriter
from pipelines.server.api.skipping import header_of
from pipelines.server.continuation import continued
from pipelines.server.engine_session import EngineSession
from pipelines.server.generation_routes import response_writer
from pipelines.server.responses.history import input_items
from pipelines.server.responses.store import ResponseStore, StoredResponse
from pipelines.server.service import Service
from pipelines.server.stream import ClientGone, Ends

log = logging.getLogger(__name__)

UNFINISHED = ("queued", "in_progress")
LOST = "the server ended before the response was complete, or could not store it: send the request again"


@dataclass(eq=False)
class _Run:
    """A response that is being generated."""

    session: EngineSession
    writer: ResponseWriter
    timeout_s: float
    items: list[dict[str, Any]]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the response is stored."""

    def stored(self) -> StoredResponse:
        """Return the response as it is now. It is queued until its first token."""
        status = "in_progress" if self.writer.generation.num_generated else "queued"
        return StoredResponse(self.writer.response(status), self.items, 0)

    async def receive(self) -> Message:
        """Wait for the cancellation. It ends a run like a disconnect ends a request."""
        await self.cancelled.wait()
        return {"type": "http.disconnect"}


class KeptResponses:
    """The stored and the running responses. `owner`, the name of an API key, finds only the key's own responses."""

    def __init__(self, service: Service, chat: Chat, store: ResponseStore) -> None:
        self._service = service
        self._chat = chat
        self._store = store
        self._running: dict[tuple[str | None, str], _Run] = {}
        self._tasks = set[asyncio.Task[None]]()

    async def start(self, session: EngineSession, body: ResponseRequest, timeout_s: float) -> Response:
        """Begin a background response and return it as queued. Raises ApiError; then the caller ends the session."""
        if body.stream:
            raise not_allowed(
                "stream", True, "with background=true poll GET /v1/responses/ID, or leave one of them out"
            )
        if body.store is False:
            raise not_allowed("store", False, "background=true needs a stored response, give true")
        record = session.record = replace(session.record)  # the request ends earlier and is logged alone
        with ExitStack() as resources:
            resources.enter_context(self._service.admission.place(1, timeout_s))
            writer = await response_writer(body, session, self._chat)
            queued = writer.response("queued")
            run = _Run(session, writer, timeout_s, input_items(writer.request.items, queued["id"]))
            if not await self._store.save(record.key, queued, run.items):
                message = "the response cannot be stored: leave background out"
                raise ApiError(503, message, SERVER_ERROR, code="response_store")
            self._running[record.key, queued["id"]] = run
            self._service.began()
            task = asyncio.create_task(self._finish(run, resources.pop_all()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        answer = json_response(queued)
        answer.raw_headers += header_of(record.warnings)
        return answer

    async def get(self, owner: str | None, id: str) -> StoredResponse:
        """Return a response. Raises ApiError (404, 503)."""
        if (run := self._running.get((owner, id))) is not None:
            return run.stored()
        stored = await self._store.find(owner, id)
        if stored is None:
            raise _missing(id)
        if stored.response["status"] in UNFINISHED:
            lost = {"status": "failed", "error": {"code": "server_error", "message": LOST}}
            return stored._replace(response=stored.response | lost)
        return stored

    async def cancel(self, owner: str | None, id: str) -> dict[str, Any]:
        """Cancel a background response and return it. A response that has ended stays as it is.

        Raises ApiError (400, 404, 503).
        """
        await self._end(owner, id)
        response = (await self.get(owner, id)).response
        if not response["background"]:
            message = f"the response {id[:100]} did not run with background=true, so it cannot be cancelled"
            raise bad_request(f"{message}: leave it as it is, or delete it", "id")
        return response

    async def remove(self, owner: str | None, id: str) -> None:
        """Delete a response, and cancel it first if it runs. Raises ApiError (404, 503)."""
        await self._end(owner, id)
        if not await self._store.remove(owner, id):
            raise _missing(id)

    async def _end(self, owner: str | None, id: str) -> None:
        if (run := self._running.get((owner, id))) is not None:
            run.cancelled.set()
            await run.ended.wait()

    async def _finish(self, run: _Run, resources: ExitStack) -> None:
        """Generate and store a response, then release its `resources`."""
        record, reason = run.session.record, None
        ends = Ends(run.receive, run.timeout_s, self._service.stopping)
        try:
            with resources, renamed_errors(NAMES):
                await ends.run(continued(run.session, run.writer.generation, run.writer, False))
            response = run.writer.ended
        except ClientGone:
            response, reason = run.writer.response("cancelled"), "cancelled"
        except ApiError as error:
            response, reason = run.writer.failed(error).data["response"], error.code or error.type
        except Exception:
            log.error("a background response failed:\n%s", traceback.format_exc())
            response, reason = run.writer.failed(failed()).data["response"], "failed"
        finally:
            run.session.end(reason)
        try:
            await self._store.save(record.key, response, run.items)
        finally:
            del self._running[record.key, response["id"]]
            run.ended.set()
            record.status = 200
            self._service.done(record, is_logged=True)


def json_response(content: dict[str, Any]) -> Response:
    """Return a response. Schemas of tools may have infinite numbers, which JSONResponse refuses."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def _missing(id: str) -> ApiError:
    message = f"the response {id[:100]} does not exist: it was not stored, or it was deleted, or it has expired"
    return ApiError(404, message, param="id")
