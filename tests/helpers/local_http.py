"""A server over the fake engine, asked within the process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from conf.schema import ModelConfig, RunConfig, Task
from conf.serving import ServeConfig
from pipelines.serve.app import add_errors
from pipelines.serve.exchange import Exchange
from pipelines.serve.frames import Delta, Submit
from pipelines.serve.guard import Guard
from pipelines.serve.service import Result, Service
from pipelines.serve.stream import DONE, event
from tests.helpers.fake_engine import FakeEngine

URL = "http://127.0.0.1:8000"


def service_of(engine: FakeEngine, adapters: dict[str, str] | None = None, **config: Any) -> Service:
    """`config`: fields of ServeConfig."""
    run = RunConfig(Task.serve, ModelConfig(path="models/tiny", adapters=adapters), serve=ServeConfig(**config))
    run.serve.model_name = run.serve.model_name or "tiny"
    return Service(run, engine)


def echoing(service: Service, keys: dict[str, bytes] | None = None) -> Guard:
    """An application with one route, /v1/echo, that answers {"ids": [...], "stream": bool, "n": int} by what the engine says of the ids."""
    app = FastAPI()

    @app.post("/v1/echo")
    async def echo(request: Request) -> Response:
        body = await request.json()
        is_stream, n = body.get("stream", False), body.get("n", 1)

        async def work(exchange: Exchange) -> Result:
            answer = exchange.submit(Submit(0, body["ids"], {"n": n}, streams=is_stream))
            await answer.accepted()

            async def events() -> AsyncIterator[bytes]:
                async for item in answer:
                    if isinstance(item, Delta):
                        yield event(item.text.encode())
                yield DONE

            if is_stream:
                return events()
            return {"text": "".join([item.text async for item in answer if isinstance(item, Delta)])}

        return await service.respond(request, body.get("model", "tiny"), n, is_stream, work)

    add_errors(app)
    return Guard(app, service, keys or {})


@asynccontextmanager
async def asking(app: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, without a socket."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=URL, **options) as client:
        yield client
