"""A server over the fake engine, called within the process."""

import json
import tempfile
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from conf.schema import ModelConfig, RunConfig, Task
from conf.serving import ServeConfig
from pipelines.replicas.engine_process.client import RemoteEngine
from pipelines.replicas.engine_process.frames import Submit
from pipelines.server.api.answer_shapes import AnswerShape, ChatAnswer, CompletionAnswer, MessageAnswer, ResponseAnswer
from pipelines.server.api.answers import DONE, Event
from pipelines.server.api.conversation import Chat
from pipelines.server.api.generation import Generation, Named, RequestContext
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import Body
from pipelines.server.api.writers import Writer
from pipelines.server.app import create_app
from pipelines.server.batches.jobs import BatchJobs
from pipelines.server.continuation import continued
from pipelines.server.engine_response import EngineResponse, Result, Stream, timeout_s
from pipelines.server.engine_session import EngineSession
from pipelines.server.error_handlers import add_errors
from pipelines.server.guard import Guard
from pipelines.server.records import Record
from pipelines.server.routes import ROUTES
from pipelines.server.service import Service
from pipelines.server.stream import written
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.serving import run_async, tokenizer

URL = "http://127.0.0.1:8000"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
SHAPES: dict[Any, type[AnswerShape]] = {
    "chat.completion": ChatAnswer,
    "text_completion": CompletionAnswer,
    "response": ResponseAnswer,
    "message": MessageAnswer,
}
"""Schemas of whole answers, by their `object` or `type`."""


def service_of(
    engine: RemoteEngine,
    adapters: dict[str, str] | None = None,
    prefixes: dict[str, str] | None = None,
    **config: Any,
) -> Service:
    """Return a service. `config`: fields of ServeConfig."""
    model = ModelConfig(path="models/tiny", adapters=adapters, prefixes=prefixes)
    run = RunConfig(Task.serve, model, serve=ServeConfig(**config))
    run.serve.model_name = run.serve.model_name or "tiny"
    if isinstance(engine, FakeEngine) and engine.info is not None:
        engine.info = replace(engine.info, adapters=dict(adapters or {}))
    return Service(run.model, run.serve, engine)


class Asked(Body):
    """The body of /v1/echo."""


def echoing(service: Service, keys: dict[str, bytes] | None = None) -> Guard:
    """Return an application with the single route /v1/echo. It answers {"ids": [...], "stream": bool, "n": int} with
    the engine's output for the ids."""
    app = FastAPI()

    @app.post("/v1/echo")
    async def echo(request: Request) -> Response:
        body = await request.json()
        is_stream, n = body.get("stream", False), body.get("n", 1)

        async def work(session: EngineSession) -> Result:
            session.submit([Submit(0, body["ids"], {"n": n}, streams=is_stream)])
            await session.accepted()

            async def parts() -> AsyncGenerator[bytes]:
                async for _, delta in session.deltas():
                    yield written([Event(delta.text)])
                yield written([DONE])

            if is_stream:
                return Stream(parts(), lambda error: Event(error.body()))
            return {"text": "".join([delta.text async for _, delta in session.deltas()])}

        asked = check_request(Asked, {"model": body.get("model")})
        session = service.session(request.state.record, asked, "", None)
        seconds = timeout_s(request.headers, service.config.request_timeout_s, is_stream)
        return EngineResponse(service, session, n, seconds, work)

    add_errors(app)
    return Guard(app, service, keys or {})


def exchange_of(engine: RemoteEngine, last_event_id: str | None = None) -> EngineSession:
    """Return the engine session of a request without an API key."""
    service, head = service_of(engine), RequestContext("cmpl-1", "tiny", None, last_event_id)
    return EngineSession(engine, service.admission, service.metrics, Record("1", "POST", "/"), head, Named())


def parsed(content: str) -> list[Event]:
    """Return the server-sent events of a stream, without [DONE]."""
    events = []
    for event in content.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        events.append(Event(json.loads(fields["data"]), fields.get("id"), fields.get("event")))
    return events


async def answer_of(session: EngineSession, generation: Generation, writer: Writer, is_stream: bool) -> Any:
    """Return the body, or the events."""
    try:
        result = await continued(session, generation, writer, is_stream)
        if isinstance(result, dict):
            SHAPES[result.get("object", result.get("type"))].model_validate_json(json.dumps(result), strict=True)
            return result
        return parsed(b"".join([part async for part in result.events]).decode())
    finally:
        session.end()


async def check_shape(response: httpx.Response) -> None:
    """Raise an error if an answer does not match its route's schema."""
    route = ROUTES.get(response.request.url.path)
    if route and response.status_code == 200 and response.headers["content-type"] == "application/json":
        route.shape.model_validate_json(await response.aread(), strict=True)


@asynccontextmanager
async def asking(app: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of the application, without a socket. It checks that answers match their schemas."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    hooks = {"response": [check_shape]}
    async with httpx.AsyncClient(transport=transport, base_url=URL, event_hooks=hooks, **options) as client:
        yield client


@cache
def jobs() -> BatchJobs:
    """Batches that are stored and not run."""
    folder = tempfile.TemporaryDirectory()
    jobs = BatchJobs(Path(folder.name), 1, 4096)
    weakref.finalize(jobs, folder.cleanup)
    return jobs


def app_of(service: Service, keys: dict[str, bytes] | None = None, admins: dict[str, bytes] | None = None) -> ASGIApp:
    return create_app(service, Chat(tokenizer(), ServeConfig()), keys or {}, jobs(), admins or {})


def ask(
    method: str,
    path: str,
    service: Service | None = None,
    keys: dict[str, bytes] | None = None,
    admins: dict[str, bytes] | None = None,
    **request: Any,
) -> httpx.Response:
    async def asked() -> httpx.Response:
        async with asking(app_of(service or service_of(FakeEngine()), keys, admins)) as client:
            return await client.request(method, path, **request)

    return run_async(asked())
