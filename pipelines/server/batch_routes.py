"""The routes of /v1/files and /v1/batches, and the sender that runs batch lines through the server's own routes."""

import asyncio
import json
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from uuid import uuid4

from fastapi import FastAPI, Query
from fastapi.requests import Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.responses import MalformedRangeHeader, RangeNotSatisfiable
from starlette.types import Receive, Scope, Send

from pipelines.server.api import answer_shapes
from pipelines.server.api.batches import BatchPage, BatchRequest, FilePage, FileRequest, listed
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import ApiError, bad_request, failed
from pipelines.server.api.parsing import check_request, parse_request
from pipelines.server.batches.jobs import BatchJob, BatchJobs, Reply
from pipelines.server.engine_response import Stream
from pipelines.server.openapi import responses, takes
from pipelines.server.records import Record
from pipelines.server.routes import ROUTES
from pipelines.server.service import Service
from pipelines.server.stream import ReaderStopped, Sender, abort

log = logging.getLogger(__name__)

CHUNK = 1 << 20
SECONDS = "expires_after[seconds]"
UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        SECONDS: {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}


def add_files(app: FastAPI, jobs: BatchJobs, send_timeout_s: float) -> None:
    """Add the routes of files. A key sees only its own files."""
    body = {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}}

    @app.post(
        "/v1/files",
        response_model=answer_shapes.File,
        responses=responses(200, 413, 415),
        openapi_extra={"requestBody": body},
    )
    async def upload(request: Request) -> JSONResponse:
        """Upload the input file of a batch."""
        async with request.form(max_files=1, max_fields=len(UPLOAD["properties"])) as form:
            file, fields = _upload_of(form)
            kept_s = fields.expires_after.seconds if fields.expires_after else None
            name = (file.filename or "")[:255]
            stored = await asyncio.to_thread(jobs.files.add, _owner(request), name, "batch", _chunks(file.file), kept_s)
        return JSONResponse(stored.described())

    @app.get("/v1/files", response_model=answer_shapes.Files, responses=responses(200))
    async def files(request: Request, page: Annotated[FilePage, Query()]) -> JSONResponse:
        """List the files."""
        files = [file.described() for file in jobs.files.of(_owner(request))]
        matching = [file for file in files if page.purpose in (None, file["purpose"])]
        return JSONResponse(listed(matching if page.order == "asc" else matching[::-1], page.after, page.limit))

    @app.get("/v1/files/{file_id}", response_model=answer_shapes.File, responses=responses(200, 404))
    async def file(request: Request, file_id: str) -> JSONResponse:
        """Describe a file."""
        return JSONResponse(jobs.files.get(_owner(request), file_id).described())

    @app.get("/v1/files/{file_id}/content", responses=responses(200, 404, media="application/jsonl"))
    async def content(request: Request, file_id: str) -> Response:
        """Return the content of a file."""
        stored = jobs.files.get(_owner(request), file_id)
        return Download(jobs.files.path(stored.id), send_timeout_s)

    @app.delete("/v1/files/{file_id}", response_model=answer_shapes.Deleted, responses=responses(200, 404))
    async def remove(request: Request, file_id: str) -> JSONResponse:
        """Delete a file. Files that a batch still reads cannot be deleted."""
        await jobs.remove_file(_owner(request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def add_batches(app: FastAPI, jobs: BatchJobs) -> None:
    """Add the routes of batches. A key sees only its own batches."""

    @app.post("/v1/batches", **takes(BatchRequest, answer_shapes.BatchAnswer))
    async def create(request: Request) -> JSONResponse:
        """Create a batch from an uploaded file."""
        body = parse_request(BatchRequest, await request.body())
        return JSONResponse((await jobs.create(_owner(request), body)).described())

    @app.get("/v1/batches", response_model=answer_shapes.Batches, responses=responses(200))
    async def batches(request: Request, page: Annotated[BatchPage, Query()]) -> JSONResponse:
        """List the batches, newest first."""
        return JSONResponse(
            listed([batch.described() for batch in jobs.of(_owner(request))[::-1]], page.after, page.limit)
        )

    @app.get("/v1/batches/{batch_id}", response_model=answer_shapes.BatchAnswer, responses=responses(200, 404))
    async def batch(request: Request, batch_id: str) -> JSONResponse:
        """Describe a batch."""
        return JSONResponse(jobs.get(_owner(request), batch_id).described())

    @app.post(
        "/v1/batches/{batch_id}/cancel", response_model=answer_shapes.BatchAnswer, responses=responses(200, 404, 415)
    )
    async def cancel(request: Request, batch_id: str) -> JSONResponse:
        """Cancel a batch that still runs."""
        return JSONResponse((await jobs.cancel(_owner(request), batch_id)).described())


def _owner(request: Request) -> str | None:
    record: Record = request.state.record
    return record.key


def _upload_of(form: FormData) -> tuple[UploadFile, FileRequest]:
    """Return the file and the validated form fields. Raises ApiError (400)."""
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name in fields or name not in UPLOAD["properties"] or isinstance(value, UploadFile) != (name == "file"):
            raise bad_request(f"{name[:100]} is not allowed here: give {', '.join(UPLOAD['properties'])}", name[:100])
        fields[name] = value
    if "file" not in fields:
        raise bad_request("file is missing: give it", "file")
    file = fields.pop("file")
    after = {name[len("expires_after[") : -1]: fields.pop(name) for name in [*fields] if name.startswith("expires")}
    if after:
        is_number = re.fullmatch("[0-9]{1,18}", after.get("seconds", ""))  # int() refuses very long numbers
        fields["expires_after"] = after | ({"seconds": int(after["seconds"])} if is_number else {})
    return file, check_request(FileRequest, fields)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


class Download(FileResponse):
    """Streams a file. The connection is closed if the client stops reading."""

    def __init__(self, path: Path, send_timeout_s: float) -> None:
        super().__init__(path, media_type="application/jsonl")
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            if "range" in headers and "if-range" not in headers:  # with if-range, starlette may ignore the range
                self._check_range(headers["range"], Path(self.path).stat().st_size)
            await super().__call__(scope, receive, Sender(send, self._send_timeout_s).send_message)
        except ReaderStopped:
            abort(scope)

    def _check_range(self, header: str, size: int) -> None:
        """Raise ApiError (400, 416) for an invalid range. Starlette would answer in plain text."""
        try:
            self._parse_range_header(header, size)
        except MalformedRangeHeader as error:
            raise bad_request(f"the header range={header[:100]} is not allowed: {error.content}", None) from error
        except RangeNotSatisfiable as error:
            message = f"the header range={header[:100]} is outside the file, which has {size} bytes"
            raise ApiError(416, message, headers={"content-range": f"bytes */{size}"}) from error


class LineSender:
    """Runs the lines of batches through the server's own routes, at background priority."""

    def __init__(self, service: Service, chat: Chat) -> None:
        self._service = service
        self._chat = chat

    async def __call__(self, batch: BatchJob, body: dict[str, Any]) -> Reply:
        """Return the reply to a line's body."""
        record = Record(uuid4().hex, "POST", batch.endpoint, key=batch.owner, batch=batch.id)
        self._service.began()
        try:
            answer, record.status = await self._answer(record, body), 200
        except ApiError as error:
            answer, record.status = error.body(), error.status
        except Exception:
            log.error("a line of %s failed:\n%s", batch.id, traceback.format_exc())
            answer, record.status = failed().body(), 500
        finally:
            self._service.done(record, is_logged=True)
        return Reply(record.status, record.id, answer)

    async def _answer(self, record: Record, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("stream"):
            raise bad_request("stream=true is not allowed: lines are answered whole, leave it out", "stream")
        route = ROUTES[record.path]
        request: Any = parse_request(route.kind, json.dumps(body).encode())
        session = self._service.session(record, request, route.prefix, None)
        try:
            answer = await route.answer(request, session, self._chat)
        finally:
            session.end()
        if isinstance(answer, Stream):
            raise TypeError(f"{record.path} streams what was asked as a whole")
        return answer
