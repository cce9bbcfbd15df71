"""Limits of connections before a request: their number, silence, and data that is not HTTP. Real sockets, no engine."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from conf.serving import ServeConfig
from pipelines.server import serve
from tests.helpers.cases import each
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import echoing, service_of
from tests.helpers.serving import run_async

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@asynccontextmanager
async def listening(max_connections: int, keep_alive_s: float = 60.0, app: Any = hello) -> AsyncIterator[int]:
    """Return the port of a server with our protocol."""
    with serve._bound(ServeConfig(port=0)) as listener:
        protocol = serve._protocol(max_connections, keep_alive_s)
        http = serve._Uvicorn(uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None))
        task = asyncio.create_task(http.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            http.should_exit = True
            await task


async def connected(port: int) -> Connection:
    return await asyncio.open_connection("127.0.0.1", port)


async def answer(connection: Connection, content: bytes = REQUEST) -> bytes:
    """Return the head of a response, and the body of the length that it declares."""
    reader, writer = connection
    writer.write(content)
    return await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(5)


async def refused(connection: Connection, content: bytes = b"") -> tuple[str, dict[str, Any]]:
    """Return the status and the error after which the connection ends."""
    reader, writer = connection
    writer.write(content)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return head.split(b"\r\n")[0].decode(), json.loads(body)["error"]


def test_connections_are_bounded() -> None:
    """Existing connections continue, and a closed one makes room."""

    async def test() -> None:
        async with listening(max_connections=2) as port:
            held = [await connected(port) for _ in range(2)]
            for connection in held:
                assert (await answer(connection)).endswith(b"hello")
            status, error = await refused(await connected(port))
            assert (status, error["code"]) == ("HTTP/1.1 503 Service Unavailable", "connections")
            assert error["message"] == "there are too many connections: try again"
            assert (await answer(held[0])).endswith(b"hello")
            held[0][1].close()
            await held[0][1].wait_closed()
            for _ in range(100):  # until the server has noticed the end
                reader, writer = await connected(port)
                writer.write(REQUEST)
                if (await reader.readline()).startswith(b"HTTP/1.1 200"):
                    break
                await asyncio.sleep(0)
            else:
                pytest.fail("the place of a connection that ended is never free")

    run_async(test())


@each("sent", [b"", b"GET / HT"])
def test_a_connection_that_asks_nothing_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HEAD_S", 0.01)

    async def test() -> None:
        async with listening(max_connections=2) as port:
            reader, writer = await connected(port)
            writer.write(sent)
            assert await reader.read() == b""  # which ends with the connection

    run_async(test())


def test_a_connection_that_asks_nothing_more_is_closed() -> None:
    async def test() -> None:
        async with listening(max_connections=2, keep_alive_s=0.01) as port:
            connection = await connected(port)
            await answer(connection)
            assert await connection[0].read() == b""

    run_async(test())


def test_targets_and_bodies_that_proxies_send() -> None:
    """A target that is a whole URL, whose host is checked; a body with two lengths, after which the connection ends."""

    async def test() -> None:
        async with listening(2, app=echoing(service_of(FakeEngine()))) as port:
            reader, writer = await connected(port)
            for target, host, status in (
                (b"http://localhost/v1/echo", b"evil.example", b"405"),
                (b"HTTP://localhost:8000/v1/nothing?a=b", b"x", b"404"),
                (b"http://evil.example/v1/echo", b"localhost", b"421"),
                (b"http://localhost", b"localhost", b"404"),
            ):
                writer.write(b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.split()[1] == status, (target, head)
                await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))
            body = json.dumps({"ids": [5]}).encode()
            lengths = b"content-length: 3\r\ntransfer-encoding: chunked\r\ncontent-type: application/json\r\n"
            writer.write(b"POST /v1/echo HTTP/1.1\r\nhost: localhost\r\n" + lengths + b"\r\n")
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            head, _, content = (await reader.read()).partition(b"\r\n\r\n")
            assert (b"connection: close" in head, b'{"text":"t5 "}' in content) == (True, True)

    run_async(test())


def test_invalid_http_is_an_error_of_openais_shape() -> None:
    async def test() -> None:
        async with listening(max_connections=2) as port:
            status, error = await refused(await connected(port), b"\x16\x03\x01 hello\r\n\r\n")
            assert status == "HTTP/1.1 400 Bad Request"
            assert error == {
                "message": "the request is not valid HTTP",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }

    run_async(test())
