"""Stored responses with OpenAI's client, over the fake engine: conversations, pages, background, limits and faults."""

import asyncio
import json
import signal
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from conf.errors import UserError
from conf.serving import ServeConfig
from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.server.responses import history, store
from pipelines.server.responses.store import ResponseStore
from pipelines.server.service import Service
from tests.helpers.cases import each
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import URL, app_of, service_of
from tests.helpers.server import ended, served
from tests.helpers.serving import run_async

KEYS = {"alice": b"secret-1", "bob": b"secret-2"}
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
SETTINGS: Any = {"model": "tiny", "max_output_tokens": 3, "temperature": 0}
NOT_FOUND = "previous_response_not_found"


class Server:
    """A server over the fake engine, with the clients of alice and bob."""

    def __init__(self, **config: Any) -> None:
        self.engine = FakeEngine(context_length=2_000, num_cache_tokens=2_000)
        self.service: Service = service_of(self.engine, **config)
        transport = httpx.ASGITransport(app_of(self.service, KEYS), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=URL, headers={"authorization": "Bearer secret-1"})
        self.alice, self.bob = (
            openai.AsyncOpenAI(api_key=key.decode(), base_url=f"{URL}/v1", http_client=self.http, max_retries=0)
            for key in KEYS.values()
        )

    @property
    def store(self) -> ResponseStore:
        assert self.service.response_store is not None
        return self.service.response_store

    @property
    def prompt(self) -> list[int]:
        """The last prompt of the engine."""
        return self.engine.submitted[-1].prompt_token_ids

    async def answer(self, input: Any = "Hi", **more: Any) -> Response:
        response: Response = await self.alice.responses.create(input=input, **SETTINGS, **more)
        return response

    async def is_kept(self, id: str) -> bool:
        """Whether a response can be continued, which is so if it can be retrieved."""
        found = await self.http.get(f"/v1/responses/{id}")
        if found.status_code == 404:
            with pytest.raises(openai.BadRequestError) as refused:
                await self.answer(previous_response_id=id)
            assert (refused.value.code, refused.value.param) == (NOT_FOUND, "previous_response_id")
            return False
        assert (await self.answer(previous_response_id=id, store=False)).previous_response_id == id
        return True

    async def ended(self, id: str) -> Response:
        while (response := await self.alice.responses.retrieve(id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0)
        return response


@asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[Server]:
    server = Server(**{"response_store": "memory"} | config)
    try:
        yield server
    finally:
        await asyncio.wait_for(server.service.idle.wait(), 10)  # no background response is left
        assert server.service.admission._num_sequences == 0
        await server.store.close()


async def check_a_continued_prompt_is_the_whole_ones(tmp_path: Path) -> None:
    """Also the prompts of streams, and of the third turn. Instructions are not inherited."""
    first: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"role": "user", "content": "d"},
    ]
    async with serving() as server:
        answer = await server.answer(first, instructions="Be brief.")
        assert (answer.store, answer.background, answer.previous_response_id) == (True, False, None)
        items = [*first, *(item.model_dump(exclude_none=True) for item in answer.output)]
        for turn, instructions in enumerate((None, "Be long.", None)):
            asked: Any = {"previous_response_id": answer.id, "instructions": instructions}
            question: Any = [{"role": "user", "content": f"More {turn}."}]
            counted = await server.alice.responses.input_tokens.count(
                model="tiny", input=question[0]["content"], **asked
            )
            if turn == 1:
                stream = await server.alice.responses.create(input=question, stream=True, **SETTINGS, **asked)
                *_, last = [event async for event in stream]
                answer = last.response
            else:
                answer = await server.answer(question[0]["content"], **asked)
            prompt = server.prompt
            items += question
            whole = await server.answer(items, instructions=instructions, store=False)
            assert (prompt, counted.input_tokens) == (server.prompt, len(prompt))
            assert answer.output_text == whole.output_text
            assert (whole.store, await server.is_kept(whole.id)) == (False, False)
            items += [item.model_dump(exclude_none=True) for item in answer.output]


async def check_responses_are_read_and_deleted(tmp_path: Path) -> None:
    async with serving() as server:
        first = await server.answer()
        assert await server.alice.responses.retrieve(first.id) == first
        second = await server.answer("More", previous_response_id=first.id)
        await server.alice.responses.delete(first.id)
        assert not await server.is_kept(first.id)
        assert await server.is_kept(second.id)  # its row has the whole conversation
        await server.answer("More", previous_response_id=second.id)
        for call in (server.alice.responses.delete, server.alice.responses.cancel, server.alice.responses.retrieve):
            with pytest.raises(openai.NotFoundError, match="does not exist: it was not stored"):
                await call(first.id)
        deleted = await server.http.delete(f"/v1/responses/{second.id}")
        assert deleted.json() == {"id": second.id, "object": "response", "deleted": True}
        tool: Any = {"type": "mcp", "most": float("inf")}
        content = json.dumps({"input": "Hi", "tools": [tool], "background": True, **SETTINGS})
        headers = {"content-type": "application/json"}
        queued = await server.http.post("/v1/responses", content=content.replace("Infinity", "1e999"), headers=headers)
        assert queued.status_code == 200, queued.text
        assert (await server.ended(queued.json()["id"])).tools
        third = await server.answer()
        with pytest.raises(openai.BadRequestError, match="include.* is not supported") as refused:
            await server.alice.responses.retrieve(third.id, include=["reasoning.encrypted_content"])
        assert str(refused.value.param).startswith("include")
        with pytest.raises(openai.BadRequestError, match="stream is not supported"):
            await server.alice.responses.retrieve(third.id, stream=True)
        with pytest.raises(openai.BadRequestError, match="did not run with background=true"):
            await server.alice.responses.cancel(third.id)
        with pytest.raises(openai.BadRequestError, match="conversation is not supported"):
            await server.answer(conversation="conv_1", previous_response_id=third.id)
        given = await server.answer(extra_headers={"x-request-id": "chosen"})
        assert "chosen" not in given.id  # a client cannot choose the id, and so not replace a response


async def check_input_items_are_listed(tmp_path: Path) -> None:
    items: Any = [
        {"role": "user", "content": "a", "id": "same"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "same"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
        {"role": "assistant", "content": "b"},
    ]
    async with serving() as server:
        first = await server.answer(items)
        second = await server.answer("More", previous_response_id=first.id)
        listed = [item async for item in server.alice.responses.input_items.list(second.id, limit=2, order="asc")]
        for item in listed:
            ITEM.validate_python(item.to_dict(mode="python"))
        assert len({item.id for item in listed}) == len(listed) == len(items) + 2
        assert listed[4].to_dict() == first.output[0].to_dict()
        texts = [part.text for item in (listed[0], listed[3], listed[5]) for part in item.content]  # type: ignore[union-attr]
        assert texts == ["a", "b", "More"]
        pages = server.alice.responses.input_items.list
        newest = await pages(second.id)
        assert ([item.id for item in newest.data], newest.has_more) == ([item.id for item in listed[::-1]], False)
        for options, param in (({"limit": 0}, "limit"), ({"after": "x"}, "after"), ({"order": "up"}, "order")):
            with pytest.raises(openai.BadRequestError) as refused:
                await pages(second.id, **options)  # type: ignore[arg-type]
            assert refused.value.param == param
        with pytest.raises(openai.NotFoundError):
            await pages("resp_none")


async def check_another_keys_ids_are_unknown(tmp_path: Path) -> None:
    async with serving() as server:
        kept = await server.answer()
        server.engine.speaks.clear()
        running = await server.answer(background=True)
        bob = server.bob.responses
        for id in (kept.id, running.id):
            for call in (bob.retrieve, bob.delete, bob.cancel, bob.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    await call(id)
            with pytest.raises(openai.BadRequestError) as refused:
                await bob.create(input="Hi", previous_response_id=id, **SETTINGS)
            assert refused.value.code == NOT_FOUND
        assert (await server.alice.responses.retrieve(running.id)).status == "queued"
        server.engine.speaks.set()
        assert (await server.ended(running.id)).status == "incomplete"


async def check_background_responses_run(tmp_path: Path) -> None:
    async with serving(request_timeout_s=60) as server:
        engine, api = server.engine, server.alice.responses
        whole = await server.answer()
        engine.pauses_after = 1
        engine.speaks.set()
        queued = await server.answer(background=True, metadata={"a": "b"})
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        while (response := await api.retrieve(queued.id)).status == "queued":
            await asyncio.sleep(0)
        assert (response.status, response.metadata, response.usage) == ("in_progress", {"a": "b"}, None)
        assert [item.id async for item in api.input_items.list(queued.id)]
        with pytest.raises(openai.BadRequestError, match="is queued: give a response that is completed"):
            await server.answer(previous_response_id=queued.id)
        engine.pauses_after = None
        engine.speaks.set()
        response = await server.ended(queued.id)
        assert (response.status, response.output_text) == ("incomplete", whole.output_text)
        assert (await api.cancel(queued.id)).status == "incomplete"  # it has ended
        assert await server.is_kept(queued.id)

        engine.speaks.clear()
        stopped, deleted = [await server.answer(background=True) for _ in range(2)]
        assert (await api.cancel(stopped.id)).status == "cancelled"
        assert (await api.retrieve(stopped.id)).status == (await api.cancel(stopped.id)).status == "cancelled"
        await api.delete(deleted.id)
        assert not await server.is_kept(deleted.id)
        with pytest.raises(openai.BadRequestError, match="is cancelled: give a response"):
            await server.answer(previous_response_id=stopped.id)
        assert len(engine.cancelled) == 2


async def check_background_responses_that_fail_say_so(tmp_path: Path) -> None:
    async with serving(batch_size=1, max_waiting=0) as server:
        engine = server.engine
        for more, param in (({"stream": True}, "stream"), ({"store": False}, "store")):
            with pytest.raises(openai.BadRequestError) as refused:
                await server.answer(background=True, **more)
            assert refused.value.param == param
        with pytest.raises(openai.BadRequestError, match="context length") as refused:
            await server.answer("x " * 2_001, background=True)
        assert refused.value.param == "input"
        engine.speaks.clear()
        queued = await server.answer(background=True)
        with pytest.raises(openai.RateLimitError):  # it has the only place
            await server.answer(background=True)
        while not engine.submitted:
            await asyncio.sleep(0)
        engine.crash()
        assert (failed := await server.ended(queued.id)).status == "failed"
        assert failed.error is not None
        assert "SIGKILL" in failed.error.message
        engine.info = FakeEngine(context_length=2_000).info
        engine.refusal = EngineRefused("decode.max_new_tokens=3 is too long")
        failed = await server.ended((await server.answer(background=True)).id)
        assert failed.error is not None
        assert (failed.error.code, failed.error.message.split("=")[0]) == ("invalid_prompt", "max_output_tokens")
        engine.refusal = None
        queued = await server.answer(background=True, extra_headers={"x-request-timeout": "0.01"})
        failed = await server.ended(queued.id)
        assert failed.error is not None
        assert "longer than its time limit of 0.01 s" in failed.error.message
        with pytest.raises(openai.BadRequestError, match="leave Last-Event-ID out"):
            await server.answer(background=True, extra_headers={"last-event-id": ""})
        queued = await server.answer(background=True)
        server.service.stopping.set()
        failed = await server.ended(queued.id)
        assert failed.error is not None
        assert "shutting down" in failed.error.message


API: list[Callable[[Path], Coroutine[Any, Any, None]]] = [
    check_a_continued_prompt_is_the_whole_ones,
    check_responses_are_read_and_deleted,
    check_input_items_are_listed,
    check_another_keys_ids_are_unknown,
    check_background_responses_run,
    check_background_responses_that_fail_say_so,
]


@each("check", API)
def test_stored_responses(check: Callable[[Path], Coroutine[Any, Any, None]], tmp_path: Path) -> None:
    run_async(check(tmp_path))


async def check_the_oldest_are_deleted(tmp_path: Path) -> None:
    """Beyond the count, the bytes and the age. A response that is larger than the store deletes no other one."""
    clock = SimpleNamespace(now=1000.0)
    response, items = {"id": "0", "text": "x" * 50}, [{"text": "y" * 50}]
    size = sum(len(json.dumps(content, separators=(",", ":"))) for content in (response, items))
    for limits, left in (
        ({"response_store_count": 2}, [3, 4]),
        ({"response_store_size": str(3 * size)}, [2, 3, 4]),
        ({"response_store_size": str(3 * size - 1)}, [3, 4]),
        ({"response_store_age_s": 15.0}, [3, 4]),
    ):
        path = tmp_path / repr(limits)
        kept = ResponseStore(ServeConfig(response_store=str(path), **limits), lambda: clock.now)  # type: ignore[arg-type]
        for number in range(5):
            clock.now += 10
            assert await kept.save("a", {**response, "id": str(number)}, items)
        assert [n for n in range(5) if await kept.find("a", str(n))] == left
        count = await kept._run(lambda connection: connection.execute("SELECT count(*) FROM responses").fetchone())
        assert count == (len(left),)
        if "response_store_size" in limits:
            assert not await kept.save("a", {"id": "large", "text": "x" * 3 * size}, [])
            assert await kept.find("a", "4")
        clock.now += 20
        for call in (kept.find, kept.remove):
            assert bool(await call("a", "4")) == ("response_store_age_s" not in limits)
        await kept.close()


async def check_a_conversation_has_limits(tmp_path: Path) -> None:
    """They are the limits of a request with all items."""
    async with serving(max_body="100kB") as server:
        skipped: Any = {"type": "mcp_call", "text": "x" * 60_000}
        answer = await server.answer([skipped, {"role": "user", "content": "a"}])
        answer = await server.answer([skipped, {"role": "user", "content": "a"}], previous_response_id=answer.id)
        with pytest.raises(openai.BadRequestError, match="serve.max_body allows 100000: begin a new conversation"):
            await server.answer(previous_response_id=answer.id)
        answer = await server.answer()
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(history, "MAX_ITEMS", 3)
            assert await server.is_kept(answer.id)
            items: Any = [{"role": "user", "content": "a"}] * 2
            with pytest.raises(openai.BadRequestError, match="has 4 items with this input, and 3 are allowed"):
                await server.answer(items, previous_response_id=answer.id)


async def check_a_file_is_read_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "responses.sqlite"
    async with serving(response_store=str(path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        answer = await server.answer()
        lost = {**(await server.answer(store=True)).to_dict(), "id": "resp_lost", "status": "in_progress"}
        assert await server.store.save("alice", lost, [])
        large = (await server.answer([{"type": "mcp_call", "text": "x" * 50_000}, {"role": "user", "content": "a"}])).id
    path.chmod(0o644)
    async with serving(response_store=str(path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await server.is_kept(answer.id)
        response = await server.alice.responses.retrieve("resp_lost")
        assert (response.status, response.error and response.error.code) == ("failed", "server_error")
    content = bytearray(path.read_bytes())
    content[20_000:60_000] = bytes(40_000)  # pages of the large row
    path.write_bytes(content)
    async with serving(response_store=str(path)) as server:
        with pytest.raises(openai.InternalServerError) as refused:
            await server.alice.responses.retrieve(large)
        assert (refused.value.status_code, refused.value.code) == (503, "response_store")
        assert (await server.answer()).output_text


async def check_fails(server: Server, is_read: bool = True) -> None:
    """The store cannot be written: answers say so, and are complete. It cannot be read: 503, without an answer."""
    whole = await server.http.post("/v1/responses", json={"input": "Hi", **SETTINGS})
    assert (whole.status_code, whole.json()["store"], bool(whole.json()["output"])) == (200, False, True)
    assert whole.headers["x-quintet-warning"] == "store is not used: the response cannot be stored"
    stream = await server.alice.responses.create(input="Hi", stream=True, **SETTINGS)
    *_, last = [event async for event in stream]
    assert (last.type, last.response.store) == ("response.incomplete", False)
    with pytest.raises(openai.InternalServerError) as refused:
        await server.answer(background=True)
    assert (refused.value.status_code, refused.value.code, refused.value.type) == (
        503,
        "response_store",
        "server_error",
    )
    calls = server.alice.responses
    for call in (calls.retrieve, calls.delete, calls.cancel, calls.input_items.list) if is_read else ():
        with pytest.raises(openai.InternalServerError) as refused:
            await call("resp_1")
        assert (refused.value.status_code, refused.value.code) == (503, "response_store")
    if is_read:
        with pytest.raises(openai.InternalServerError) as refused:
            await server.answer(previous_response_id="resp_1")
        assert refused.value.status_code == 503


async def check_a_corrupt_file(tmp_path: Path) -> None:
    """It is not overwritten. Without it the store works again."""
    path = tmp_path / "responses.sqlite"
    path.write_bytes(b"not a database" * 1000)
    async with serving(response_store=str(path)) as server:
        await check_fails(server)
        assert path.read_bytes() == b"not a database" * 1000
        path.unlink()
        assert await server.is_kept((answer := await server.answer()).id)
        changes = [
            f"UPDATE responses SET {change}" for change in ("response = '[]'", "items = '[5]'", "response = '{'")
        ]
        for change in changes:
            await server.store._run(methodcaller("execute", change))
            with pytest.raises(openai.InternalServerError) as refused:
                await server.alice.responses.retrieve(answer.id)
            assert refused.value.code == "response_store"


async def check_another_programs_database(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE runs (number INTEGER)")
        other.commit()
    content = path.read_bytes()
    async with serving(response_store=str(path)) as server:
        await check_fails(server)
    assert path.read_bytes() == content


async def check_a_locked_file(tmp_path: Path) -> None:
    """A second server takes the file over when the first one ends."""
    path = str(tmp_path / "responses.sqlite")
    async with serving(response_store=path) as first:
        answer = await first.answer()
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(store, "LOCKED_S", 0.001)
            second = Server(response_store=path)
            await check_fails(second)
            monkeypatch.setattr(store, "LOCKED_S", 1000.0)  # only the first request waits
            await check_fails(second)
        with (
            closing(sqlite3.connect(path, timeout=0)) as other,
            pytest.raises(sqlite3.OperationalError, match="locked"),
        ):
            other.execute("SELECT * FROM responses")
    assert await second.is_kept(answer.id)
    await second.store.close()


async def check_a_full_disk(tmp_path: Path) -> None:
    async with serving(response_store=str(tmp_path / "responses.sqlite")) as server:
        kept = await server.answer()
        await server.store._run(lambda connection: connection.execute("PRAGMA max_page_count = 1"))
        content: Any = [{"type": "mcp_call", "text": "x" * 50_000}, {"role": "user", "content": "a"}]
        assert (await server.answer(content)).store is False
        assert await server.is_kept(kept.id)
        await server.store._run(lambda connection: connection.execute("PRAGMA query_only = true"))
        await check_fails(server, is_read=False)
        assert (await server.alice.responses.retrieve(kept.id)).id == kept.id


async def check_a_file_that_cannot_be_created(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "file" / "responses.sqlite"):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="serve.response_store=.* cannot be used .*: give another file, or memory"):
            service_of(FakeEngine(), response_store=str(path))


async def check_a_server_without_a_store(tmp_path: Path) -> None:
    server = Server()
    for more, message, code in (
        (
            {"previous_response_id": "resp_1"},
            "nothing is kept between requests without serve.response_store",
            NOT_FOUND,
        ),
        ({"background": True}, "background=True is not allowed: it needs serve.response_store", None),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            await server.answer(**more)
        assert (refused.value.code, refused.value.param) == (code, next(iter(more)))
    assert (await server.answer(store=True)).store is False
    with pytest.raises(openai.NotFoundError, match="there is no GET /v1/responses/resp_1"):
        await server.alice.responses.retrieve("resp_1")


FAULTS: list[Callable[[Path], Coroutine[Any, Any, None]]] = [
    check_the_oldest_are_deleted,
    check_a_conversation_has_limits,
    check_a_file_is_read_after_a_restart,
    check_a_corrupt_file,
    check_another_programs_database,
    check_a_locked_file,
    check_a_full_disk,
    check_a_file_that_cannot_be_created,
    check_a_server_without_a_store,
]


@each("check", FAULTS)
def test_limits_and_faults_of_the_store(check: Callable[[Path], Coroutine[Any, Any, None]], tmp_path: Path) -> None:
    run_async(check(tmp_path))


@pytest.mark.long
def test_a_server_that_ends_and_starts_again(tmp_path: Path) -> None:
    """SIGTERM waits for background responses. After SIGKILL they have failed, and stored responses continue."""
    asked: Any = {"model": "tiny", "input": "What is 3 + 4?", "temperature": 0}
    store, ids, texts = f"serve.response_store={tmp_path / 'responses.sqlite'}", list[str](), list[str]()
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        with (
            served(tmp_path / f"run{len(texts)}", store) as (process, url),
            openai.OpenAI(base_url=f"{url}/v1", api_key="k") as client,
        ):
            responses = client.responses
            if not ids:
                ids.append(responses.create(**asked, max_output_tokens=12).id)
            continued = responses.create(**asked, max_output_tokens=12, previous_response_id=ids[0])
            texts.append(continued.output_text)
            statuses = [responses.retrieve(id).status for id in ids[1:]]
            ids.append(responses.create(**asked, max_output_tokens=300, background=True).id)
            ended(process, number)
    assert statuses[0] == "completed"
    assert statuses[1] in ("failed", "completed")  # the kill may come too late
    assert texts == texts[:1] * 3
