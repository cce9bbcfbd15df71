"""/v1/messages over the fake engine with Anthropic's client; and errors in streams of all kinds."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from conf.serving import ServeConfig
from pipelines.server.api.conversation import Chat
from pipelines.server.app import create_app
from pipelines.server.records import RequestLog
from pipelines.server.service import Service
from tests.helpers.cases import each
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import URL, asking, parsed, service_of
from tests.helpers.serving import run_async, tokenizer

KEYS = {"alice": b"secret-1"}
ASKED: Any = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
STREAMS = {
    "/v1/messages": ASKED,
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/chat/completions": {"model": "tiny", "messages": ASKED["messages"]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
}


@asynccontextmanager
async def client_of(
    engine: FakeEngine | None = None, key: str = "secret-1", service: Service | None = None
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    app = create_app(service or service_of(engine or FakeEngine()), Chat(tokenizer(), ServeConfig()), KEYS)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False))
    async with anthropic.AsyncAnthropic(api_key=key, base_url=URL, http_client=http, max_retries=0) as client:
        yield client


def test_a_message_and_its_stream_are_the_same() -> None:
    async def test() -> None:
        async with client_of() as client:
            message = await client.messages.create(**ASKED)
            async with client.messages.stream(**ASKED) as stream:
                kinds = [event.type async for event in stream]
                streamed = await stream.get_final_message()
            raw = await client.messages.with_raw_response.create(**ASKED, stream=True)
            content = (await raw.http_response.aread()).decode()
        assert (message.content[0].type, message.stop_reason, message.model) == ("text", "max_tokens", "tiny")
        assert message.content[0].text == streamed.content[0].text
        assert (message.stop_reason, message.usage.output_tokens) == (
            streamed.stop_reason,
            streamed.usage.output_tokens,
        )
        assert message.usage.output_tokens == 3
        assert message.id.startswith("msg_")
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert "[DONE]" not in content
        assert [event.name for event in parsed(content)][-2:] == ["message_delta", "message_stop"]

    run_async(test())


@each(
    ("key", "fields", "kind", "message"),
    [
        ("wrong", {}, anthropic.AuthenticationError, "the API key is missing or unknown"),
        ("secret-1", {"model": "other"}, anthropic.NotFoundError, "the model other does not exist"),
        ("secret-1", {"max_tokens": 0}, anthropic.BadRequestError, "max_tokens=0 is not allowed"),
        ("secret-1", {"system": 99 * "Hi "}, anthropic.BadRequestError, "maximum context length is 64 tokens"),
        ("secret-1", {"extra_headers": {"Last-Event-ID": ""}}, anthropic.BadRequestError, "leave Last-Event-ID out"),
        (
            "secret-1",
            {"extra_headers": {"host": "elsewhere"}},
            anthropic.APIStatusError,
            "the header Host names another",
        ),
    ],
)
def test_errors_have_anthropics_shape(key: str, fields: dict[str, Any], kind: Any, message: str) -> None:
    async def test() -> None:
        async with client_of(key=key) as client:
            with pytest.raises(kind, match=message) as caught:
                await client.messages.create(**{**ASKED, **fields})
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"].keys() == {"type", "message"}

    run_async(test())


def test_a_server_without_its_model_is_overloaded() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.info = None
        async with client_of(engine) as client:
            with pytest.raises(anthropic.APIStatusError, match="still loading") as caught:
                await client.messages.create(**ASKED)
        error: Any = caught.value.body
        assert (caught.value.status_code, error["error"]["type"]) == (503, "overloaded_error")

    run_async(test())


@each("path", STREAMS)
def test_a_stream_that_fails_ends_with_its_own_error(path: str) -> None:
    async def test() -> str:
        engine = FakeEngine()
        engine.speaks.clear()
        app = create_app(service_of(engine), Chat(tokenizer(), ServeConfig()), {})
        async with asking(app) as client:
            asked = asyncio.ensure_future(client.post(path, json={**STREAMS[path], "stream": True}))
            while not engine.submitted:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            engine.crash()
            return (await asked).text

    content = run_async(test())
    last, message = parsed(content)[-1], "the engine was ended by SIGKILL: send the request again"
    assert "[DONE]" not in content
    if path == "/v1/messages":
        assert (last.name, last.data) == (
            "error",
            {"type": "error", "error": {"type": "api_error", "message": message}},
        )
    elif path == "/v1/responses":
        assert (last.name, last.data["response"]["error"]["message"]) == ("response.failed", message)
    else:
        assert (last.name, last.data["error"]["message"]) == (None, message)


def test_the_log_has_the_metadata_of_authenticated_clients_only(tmp_path: Path) -> None:
    chat = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "p"}

    async def test() -> None:
        service = service_of(FakeEngine())
        service._log = RequestLog(tmp_path / "requests.jsonl")
        async with client_of(service=service) as client:
            await client.messages.create(**ASKED, metadata={"user_id": "42"})
        async with client_of(service=service, key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**ASKED)
        app = create_app(service, Chat(tokenizer(), ServeConfig()), KEYS)
        async with asking(app, headers={"authorization": "Bearer secret-1"}) as client:
            assert (await client.post("/v1/chat/completions", json={**ASKED, **chat})).status_code == 200
            assert (await client.get("/" + 5000 * "x")).status_code == 404
        async with asking(app) as client:
            assert (await client.get("/" + 5000 * "x")).status_code == 401

    run_async(test())
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 200, 404]
    assert [line["client"] for line in lines] == [{"metadata": {"user_id": "42"}}, chat, None]
    assert len(lines[2]["path"]) == 256
