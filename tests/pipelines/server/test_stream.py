"""Responses whose client disconnects, does not read, or times out; limits; and records."""

import asyncio
from typing import Any

import httpx
import pytest

from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.server import stream
from tests.helpers.cases import each
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import asking, echoing, service_of
from tests.helpers.serving import run_async

IDS = {"ids": [5, 6, 7]}


class Connection:
    """A client of an ASGI application that disconnects or stops reading on command."""

    def __init__(self, app: Any, body: bytes, headers: dict[str, str] | None = None) -> None:
        all_headers = {"host": "localhost", "content-type": "application/json", **(headers or {})}
        self.scope = {
            "type": "http", "method": "POST", "path": "/v1/echo", "raw_path": b"/v1/echo", "query_string": b"", "root_path": "",
            "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 9),
            "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()], "state": {"abort": self.abort},
        }  # fmt: skip
        self.left, self.reads, self.sent, self.aborted = asyncio.Event(), asyncio.Event(), list[dict[str, Any]](), False
        self.reads.set()
        self.has_sent = asyncio.Event()
        self._body: bytes | None = body
        self.task = asyncio.ensure_future(app(self.scope, self.receive, self.send))

    def abort(self) -> None:
        self.aborted = True

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.has_sent.set()
            await self.reads.wait()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def test_events() -> None:
    async def test() -> None:
        async with asking(echoing(service_of(FakeEngine()))) as client:
            answer = await client.post("/v1/echo", json={**IDS, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        assert "".join(line[6:] for line in answer.text.split("\n\n")[:-2]) == "t5 t6 t7 "
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"

    run_async(test())


@each("is_stream", [False, True])
@each("num_words", [0, 1])
def test_a_client_that_leaves_ends_its_request(is_stream: bool, num_words: int) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.pauses_after = num_words
        if not num_words:
            engine.speaks.clear()
        service = service_of(engine, batch_size=1, max_waiting=0)
        body = b'{"ids": [5, 6, 7], "stream": %s}' % (b"true" if is_stream else b"false")
        connection = Connection(echoing(service), body)
        while not engine.submitted:
            await asyncio.sleep(0)
        if num_words and is_stream:
            await connection.has_sent.wait()
        connection.left.set()
        await connection.task
        assert engine.cancelled == [1]
        assert service.admission.num_waiting_tokens == 0
        assert 'quintet:cancelled_total{model_name="tiny",why="disconnected"} 1.0' in service.metrics.text().decode()
        engine.pauses_after = None
        engine.speaks.set()
        async with asking(echoing(service)) as client:  # its capacity is free
            assert (await client.post("/v1/echo", json=IDS)).status_code == 200

    run_async(test())


def test_a_client_that_reads_nothing_is_left() -> None:
    async def test() -> None:
        engine = FakeEngine()
        connection = Connection(echoing(service_of(engine, send_timeout_s=0.01)), b'{"ids": [5, 6, 7], "stream": true}')
        connection.reads.clear()
        await connection.task
        assert connection.aborted
        assert engine.cancelled in ([1], [])  # the fake engine may have sent everything
        other = FakeEngine()
        async with asking(echoing(service_of(other))) as client:
            assert (await client.post("/v1/echo", json=IDS)).status_code == 200

    run_async(test())


def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.0)

    async def test() -> None:
        engine = FakeEngine()
        engine.speaks.clear()
        connection = Connection(echoing(service_of(engine)), b'{"ids": [5], "stream": true}')
        await connection.has_sent.wait()
        engine.speaks.set()
        await connection.task
        assert connection.text == ": keep-alive\n\ndata: t5 \n\ndata: [DONE]\n\n"

    run_async(test())


@each("header", ["x-request-timeout", "x-stainless-read-timeout"])
def test_time_that_is_over(header: str) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.speaks.clear()
        async with asking(echoing(service_of(engine))) as client:
            answer = await client.post("/v1/echo", json=IDS, headers={header: "0.01"})
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == "deadline"
        assert engine.cancelled == [1]

    run_async(test())


def test_time_that_is_over_in_a_stream() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.speaks.clear()
        async with asking(echoing(service_of(engine, request_timeout_s=0.01))) as client:
            answer = await client.post("/v1/echo", json={**IDS, "stream": True})
        assert answer.status_code == 200
        assert answer.text.startswith(
            'data: {"error":{"message":"the request took longer than its time limit of 0.01 s"'
        )
        assert "[DONE]" not in answer.text

    run_async(test())


def test_an_unread_answer_is_given_up() -> None:
    async def test() -> None:
        service = service_of(FakeEngine(), send_timeout_s=0.01)
        connection = Connection(echoing(service), b'{"ids": [5, 6, 7]}')
        connection.reads.clear()
        await connection.task
        assert connection.aborted
        assert 'why="not_read"} 1.0' in service.metrics.text().decode()
        assert service.idle.is_set()

    run_async(test())


def test_timeout_of_a_client_that_does_not_read() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.speaks.clear()
        service = service_of(engine, request_timeout_s=0.05, send_timeout_s=0.01)
        connection = Connection(echoing(service), b'{"ids": [5], "stream": true}')
        connection.reads.clear()
        await connection.task
        assert connection.aborted
        assert '"code":"deadline"' in connection.text
        assert service.idle.is_set()

    run_async(test())


@each("seconds", ["0", "-1", "nan", "inf", "soon", ""])
def test_times_that_are_none(seconds: str) -> None:
    async def test() -> httpx.Response:
        async with asking(echoing(service_of(FakeEngine()))) as client:
            return await client.post("/v1/echo", json=IDS, headers={"x-request-timeout": seconds})

    answer = run_async(test())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")


def test_an_engine_that_dies() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.speaks.clear()
        app = echoing(service_of(engine))
        async with asking(app) as client:
            asked = [
                asyncio.ensure_future(client.post("/v1/echo", json={**IDS, "stream": way})) for way in (False, True)
            ]
            while len(engine.submitted) < 2:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            engine.crash()
            body, streamed = [await response for response in asked]
            assert body.status_code == 500
            assert body.json()["error"]["code"] == "engine_gone"
            assert '"code":"engine_gone"' in streamed.text
            assert "[DONE]" not in streamed.text
            later = await client.post("/v1/echo", json=IDS)
        assert (later.status_code, later.json()["error"]["code"]) == (503, "loading")

    run_async(test())


def test_the_servers_end() -> None:
    async def test() -> None:
        engine = FakeEngine()
        service = service_of(engine)
        app = echoing(service)
        engine.speaks.clear()
        async with asking(app) as client:
            asked = [
                asyncio.ensure_future(client.post("/v1/echo", json={**IDS, "stream": way})) for way in (False, True)
            ]
            while len(engine.submitted) < 2:
                await asyncio.sleep(0)
            service.is_draining = True
            refused = await client.post("/v1/echo", json=IDS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert not service.idle.is_set()
            service.stopping.set()
            body, streamed = [await response for response in asked]
        assert body.status_code == 503
        assert '"code":"draining"' in streamed.text
        assert service.idle.is_set()
        assert sorted(engine.cancelled) == [1, 2]

    run_async(test())


def test_sequences_are_bounded() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.speaks.clear()
        app = echoing(service_of(engine, batch_size=2, max_waiting=1))
        async with asking(app) as client:
            first = asyncio.ensure_future(client.post("/v1/echo", json={**IDS, "n": 2}))
            while not engine.submitted:
                await asyncio.sleep(0)
            second = await client.post("/v1/echo", json={**IDS, "n": 2})
            assert (second.status_code, second.json()["error"]["code"]) == (429, "queue_full")
            assert 1 <= int(second.headers["retry-after"]) <= 60
            many = await client.post("/v1/echo", json={**IDS, "n": 4})
            assert (many.status_code, many.json()["error"]["param"]) == (400, "n")
            assert len(engine.submitted) == 1
            engine.speaks.set()
            assert (await first).status_code == 200
            assert (await client.post("/v1/echo", json={**IDS, "n": 2})).status_code == 200

    run_async(test())


def test_waiting_tokens_are_bounded() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.speaks.clear()
        service = service_of(engine, max_waiting_tokens=5)
        async with asking(echoing(service)) as client:
            first = asyncio.ensure_future(client.post("/v1/echo", json=IDS))
            while not engine.submitted:
                await asyncio.sleep(0)
            assert service.admission.num_waiting_tokens == 3
            refused = await client.post("/v1/echo", json=IDS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            engine.say(num_running=1)  # it waits no longer
            assert service.admission.num_waiting_tokens == 0
            second = asyncio.ensure_future(client.post("/v1/echo", json={"ids": [1] * 60}))  # more than may wait, alone
            while len(engine.submitted) < 2:
                await asyncio.sleep(0)
            engine.speaks.set()
            assert [(await response).status_code for response in (first, second)] == [200, 200]
        assert (
            'vllm:admission_rejections_total{model_name="tiny",reason="tokens"} 1.0' in service.metrics.text().decode()
        )

    run_async(test())


def test_a_model_that_there_is_not() -> None:
    async def test() -> None:
        async with asking(echoing(service_of(FakeEngine(), {"fr": "/adapters/fr"}))) as client:
            answer = await client.post("/v1/echo", json={**IDS, "model": "tinny"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert answer.json()["error"]["message"].endswith("there are tiny, fr: did you mean tiny?")
            assert (await client.post("/v1/echo", json={**IDS, "model": "fr"})).status_code == 200

    run_async(test())


def test_a_refusal_of_the_engine_leaves_no_waiting_tokens() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.refusal = EngineRefused("no")
        service = service_of(engine)
        async with asking(echoing(service)) as client:
            assert (await client.post("/v1/echo", json=IDS)).status_code == 500  # the test's route maps it to nothing
        assert service.admission.num_waiting_tokens == 0
        assert service.idle.is_set()

    run_async(test())
