"""Files and batches with OpenAI's client, over the fake engine and over real servers that are killed."""

import asyncio
import io
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest

from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.replicas.engine_process.frames import Submit
from pipelines.server.api.batches import BatchRequest
from pipelines.server.api.conversation import Chat
from pipelines.server.app import create_app
from pipelines.server.batches import files as batch_files
from pipelines.server.batches import jobs as batch_jobs
from pipelines.server.batches.jobs import BatchJobs
from pipelines.server.routes import ROUTES
from tests.helpers.cases import each
from tests.helpers.fake_engine import READY, FakeEngine, ready_for
from tests.helpers.local_http import URL, service_of
from tests.helpers.server import ended as ended_by_signal
from tests.helpers.server import served
from tests.helpers.serving import run_async, tokenizer

KEYS = {"alice": b"secret-1", "bob": b"secret-2"}
ENDPOINT: Any = "/v1/completions"


def line(id: str, url: str = ENDPOINT, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3} | body
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@asynccontextmanager
async def batching(
    folder: Path,
    engine: FakeEngine | None = None,
    keys: dict[str, bytes] | None = None,
    clock: Callable[[], float] = time.time,
    **config: Any,
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return a client of a server with batches in `folder`. With keys it is alice's."""
    service = service_of(engine or FakeEngine(), batches=str(folder), **config)
    jobs = BatchJobs(folder, service.config.batch_size, 4096, clock)
    app = create_app(service, Chat(tokenizer(), service.config), keys or {}, jobs)
    jobs.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    http_client = httpx.AsyncClient(transport=transport)
    try:
        yield openai.AsyncOpenAI(api_key="secret-1", base_url=f"{URL}/v1", http_client=http_client, max_retries=0)
    finally:
        await jobs.close()
        await asyncio.wait_for(service.idle.wait(), 10)  # nothing of a batch is left


async def begun(client: openai.AsyncOpenAI, lines: list[dict[str, Any]] | bytes, **more: Any) -> Any:
    """Return a new batch of these lines."""
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    file = await client.files.create(file=("input.jsonl", content), purpose="batch")
    asked = {"endpoint": ENDPOINT, "completion_window": "24h"} | more
    return await client.batches.create(input_file_id=file.id, **asked)


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    while (batch := await client.batches.retrieve(id)).status not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(0.002)
    return batch


async def lines_of(client: openai.AsyncOpenAI, id: str | None) -> list[dict[str, Any]]:
    if id is None:
        return []
    content = await client.files.content(id)
    return [json.loads(line) for line in content.text.splitlines()]


def test_a_batch_from_its_file_to_its_output(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with batching(tmp_path, engine) as client:
            lines = [line("a"), line("b", prompt=[9], max_tokens=1), line("c", nope=1), line("d", stream=True)]
            batch = await begun(client, lines, metadata={"why": "test"})
            assert (batch.status, batch.object, batch.endpoint) == ("validating", "batch", ENDPOINT)
            assert batch.expires_at == batch.created_at + 24 * 3600
            batch = await ended(client, batch.id)
            assert (batch.status, batch.metadata, batch.errors) == ("completed", {"why": "test"}, None)
            assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
            assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
            output = await lines_of(client, batch.output_file_id)
            said = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in output}
            assert said == {"a": "t5 t6 t7 ", "b": "t9 "}
            assert {(answer["error"], answer["response"]["status_code"]) for answer in output} == {(None, 200)}
            failed = {answer["custom_id"]: answer["response"] for answer in await lines_of(client, batch.error_file_id)}
            assert {id: (response["status_code"], response["body"]["error"]["param"]) for id, response in failed.items()} == {
                "c": (400, "nope"), "d": (400, "stream"),
            }  # fmt: skip
            ids = [answer["id"] for answer in output] + [answer["request_id"] for answer in failed.values()]
            assert len(set(ids)) == 4
            file = await client.files.retrieve(batch.output_file_id)
            assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
            assert all(isinstance(message, Submit) and message.is_background for message in engine.submitted)

    run_async(test())


@each(
    ("url", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16, "store": False}),
        ("/v1/embeddings", {"input": [3, 4]}),
    ],
)
def test_a_line_has_the_answer_of_its_route(url: str, body: dict[str, Any], tmp_path: Path) -> None:
    async def test() -> None:
        async with batching(tmp_path, FakeEngine(**ready_for(url))) as client:
            body["model"] = "tiny"
            batch_line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
            batch = await ended(client, (await begun(client, [batch_line], endpoint=url)).id)
            (answer,) = await lines_of(client, batch.output_file_id)
            alone = (await client.post(url.removeprefix("/v1"), body=body, cast_to=httpx.Response)).json()
            changing = ("id", "created", "created_at", "completed_at", "output", "seed")
            for answer_body in (answer["response"]["body"], alone):
                assert all(answer_body.pop(name, None) is not None for name in ("model", "usage"))
                for name in changing:
                    answer_body.pop(name, None)
            assert answer["response"]["body"] == alone

    run_async(test())


def test_files(tmp_path: Path) -> None:
    async def test() -> None:
        async with batching(tmp_path, max_upload="100kB") as client:
            content = jsonl([line("a")])
            after: Any = {"anchor": "created_at", "seconds": 3600}
            file = await client.files.create(file=("in.jsonl", content), purpose="batch", expires_after=after)
            assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
            assert file.expires_at == file.created_at + 3600
            other = await client.files.create(file=io.BytesIO(b"x" * 90000), purpose="batch")
            assert other.expires_at == other.created_at + 30 * 24 * 3600
            assert [stored.id async for stored in client.files.list()] == [other.id, file.id]
            assert [stored.id async for stored in client.files.list(order="asc", limit=1)] == [file.id, other.id]
            assert [stored.id async for stored in client.files.list(purpose="batch_output")] == []
            assert (await client.files.content(file.id)).content == content
            assert (await client.files.delete(file.id)).deleted
            for gone in (client.files.retrieve(file.id), client.files.content(file.id), client.files.delete(file.id)):
                with pytest.raises(openai.NotFoundError, match="there is no file"):
                    await gone
            for options, param in (({"limit": 0}, "limit"), ({"after": file.id}, "after"), ({"order": "up"}, "order")):
                with pytest.raises(openai.BadRequestError, match=param) as refused:
                    await client.files.list(**options)  # type: ignore[arg-type]
                assert refused.value.param == param
            with pytest.raises(openai.BadRequestError, match="nope is not supported"):
                await client.files.list(extra_query={"nope": 1})
            with pytest.raises(openai.APIStatusError, match="serve.max_upload allows") as long:
                await client.files.create(file=io.BytesIO(b"x" * 100001), purpose="batch")
            assert long.value.status_code == 413
            assert len(list((tmp_path / "files").iterdir())) == 2  # one file and its description

    run_async(test())


def test_a_key_has_only_so_many_bytes_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "MAX_BYTES", 100)

    async def test() -> None:
        async with batching(tmp_path) as client:
            files = [await client.files.create(file=io.BytesIO(b"x" * 50), purpose="batch") for _ in range(2)]
            with pytest.raises(
                openai.BadRequestError, match="the files have 100 bytes, and the maximum is 100: delete"
            ):
                await client.files.create(file=io.BytesIO(b"x"), purpose="batch")
            await client.files.delete(files[0].id)
            assert (await client.files.create(file=io.BytesIO(b"x"), purpose="batch")).bytes == 1

    run_async(test())


AFTER = {"purpose": "batch", "expires_after[anchor]": "created_at"}


@each(
    ("fields", "message"),
    [
        ({"purpose": "fine-tune"}, "purpose='fine-tune' is not allowed"),
        ({}, "purpose is missing"),
        ({"purpose": "batch", "nope": "1"}, "nope is not allowed here"),
        (AFTER, "expires_after.seconds is missing"),
        (AFTER | {"expires_after[seconds]": "9"}, "greater than or equal to 3600"),
        (AFTER | {"expires_after[seconds]": "²"}, "expires_after.seconds='²' is not allowed"),
        (AFTER | {"expires_after[seconds]": "9" * 5000}, "expires_after.seconds='999"),
        ({"purpose": "batch", "file": "text"}, "file is not allowed here"),
    ],
)  # fmt: skip
def test_wrong_uploads(fields: dict[str, str], message: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with batching(tmp_path) as client:
            http: Any = client._client
            files = {} if "file" in fields else {"file": ("a", b"b")}
            headers = {"content-type": "multipart/form-data; boundary=b"} if not files else {}
            content = f'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n{fields.get("file")}\r\n--b--\r\n'
            body: Any = {"data": fields, "files": files} if files else {"content": content, "headers": headers}
            answer = await http.post(f"{URL}/v1/files", **body)
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text
            assert (await http.post(f"{URL}/v1/files", json={})).status_code == 415
            twice = [("file", ("a", b"a")), ("file", ("b", b"b"))]
            form = "multipart/form-data"
            for body, reason in (
                ({"data": fields, "files": twice}, "Too many files"),
                ({"content": content, "headers": {"content-type": form}}, "Missing boundary"),
                ({"content": content, "headers": {"content-type": f"{form}; boundary=c"}}, "Invalid multipart data"),
            ):
                answer = await http.post(f"{URL}/v1/files", **body)
                assert (answer.status_code, "the form is not allowed" in answer.text) == (400, True)
                assert reason in answer.text

    run_async(test())


def test_an_unread_download_is_ended(tmp_path: Path) -> None:
    async def test() -> None:
        async with batching(tmp_path, send_timeout_s=0.05) as client:
            file = await client.files.create(file=("in.jsonl", b"x" * 500_000), purpose="batch")
            url = f"{URL}/v1/files/{file.id}/content"
            for range_header, status in (
                ("bytes=0-3", 206),
                ("bytes=500000-", 416),
                ("bytes=5-2", 400),
                ("lines=1", 400),
            ):
                answer = await client._client.get(url, headers={"range": range_header})
                assert answer.status_code == status
                assert answer.text == "xxxx" if status == 206 else range_header in answer.json()["error"]["message"]
                stale = await client._client.get(url, headers={"range": range_header, "if-range": '"another"'})
                assert (stale.status_code, len(stale.content)) == (200, 500_000)
                assert status != 416 or answer.headers["content-range"] == "bytes */500000"
            transport: Any = client._client._transport
            aborted, num_sent = asyncio.Event(), 0

            async def send(message: Any) -> None:
                nonlocal num_sent
                num_sent += 1
                await asyncio.sleep(0 if num_sent < 3 else 100)

            path, headers = f"/v1/files/{file.id}/content", [(b"host", b"localhost")]
            scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b""}
            never = asyncio.get_running_loop().create_future()
            body = {"type": "http.request", "body": b"", "more_body": False}
            parts = iter([body])

            async def receive() -> Any:
                return next(parts, None) or await never

            await transport.app({**scope, "state": {"abort": aborted.set}}, receive, send)
            assert (aborted.is_set(), num_sent) == (True, 3)

    run_async(test())


@each(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n{", "invalid_json_line", 2),
        (b"[]", "invalid_line", 1),
        (jsonl([line("a"), line("a")]), "duplicate_custom_id", 2),
        (jsonl([line("")]), "invalid_custom_id", 1),
        (jsonl([line("\ud800")]), "invalid_custom_id", 1),
        (jsonl([line("a", url="/v1/chat/completions")]), "mismatched_endpoint", 1),
        (jsonl([line("a") | {"method": "GET"}]), "invalid_method", 1),
        (jsonl([line("a") | {"body": []}]), "invalid_body", 1),
        (jsonl([line("a", prompt="x" * 5000)]), "line_too_long", 1),
    ],
)
def test_files_that_are_not_batch(content: bytes, code: str, number: int | None, tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with batching(tmp_path, engine) as client:
            batch = await ended(client, (await begun(client, content)).id)
            assert (batch.status, batch.errors.data[0].code, batch.errors.data[0].line) == ("failed", code, number)
            assert (batch.output_file_id, batch.error_file_id, engine.submitted) == (None, None, [])
            with pytest.raises(openai.BadRequestError, match="is failed: only one that runs"):
                await client.batches.cancel(batch.id)

    run_async(test())


def test_nothing_of_a_key_is_another_ones(tmp_path: Path) -> None:
    async def test() -> None:
        async with batching(tmp_path, keys=KEYS) as alice:
            bob = alice.with_options(api_key="secret-2")
            batch = await ended(alice, (await begun(alice, [line("a")])).id)
            with pytest.raises(openai.NotFoundError) as none:
                await bob.batches.retrieve("batch_none")
            for id, refused in (
                (batch.id, bob.batches.retrieve(batch.id)),
                (batch.id, bob.batches.cancel(batch.id)),
                (batch.input_file_id, bob.files.content(batch.input_file_id)),
                (batch.output_file_id, bob.files.content(batch.output_file_id)),
                (batch.output_file_id, bob.files.retrieve(batch.output_file_id)),
                (batch.input_file_id, bob.files.delete(batch.input_file_id)),
                (batch.input_file_id, begun_of(bob, batch.input_file_id)),
            ):
                with pytest.raises(openai.NotFoundError) as caught:
                    await refused
                # the same error as for a missing one
                words = str(caught.value).replace(id, "ID").replace("file", "batch")
                assert words.replace("/v1/batchs", "/v1/batches") == str(none.value).replace("batch_none", "ID")
            assert [item async for item in bob.files.list()] == [item async for item in bob.batches.list()] == []
            assert [item.id async for item in alice.batches.list()] == [batch.id]
            with pytest.raises(openai.AuthenticationError):
                await alice.with_options(api_key="wrong").files.create(file=b"x", purpose="batch")

    run_async(test())


async def begun_of(client: openai.AsyncOpenAI, file_id: str) -> Any:
    return await client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")


def test_a_cancelled_batch_keeps_what_is_done(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.pauses_after = 4
        async with batching(tmp_path, engine, batch_size=2) as client:
            lines = [line("a", max_tokens=1), *(line(str(i), max_tokens=5) for i in range(5))]
            batch = await begun(client, lines)
            with pytest.raises(openai.BadRequestError, match="is read by a batch"):
                await client.files.delete(batch.input_file_id)
            while (await client.batches.retrieve(batch.id)).request_counts.completed < 1 or len(engine.submitted) < 3:
                await asyncio.sleep(0.002)
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
            batch = await ended(client, batch.id)
            assert (batch.status, batch.cancelled_at >= batch.cancelling_at) == ("cancelled", True)
            assert batch.request_counts.to_dict() == {"total": 6, "completed": 1, "failed": 5}
            assert [answer["custom_id"] for answer in await lines_of(client, batch.output_file_id)] == ["a"]
            errors = await lines_of(client, batch.error_file_id)
            assert [answer["custom_id"] for answer in errors] == list("01234")
            assert {(answer["response"], answer["error"]["code"]) for answer in errors} == {(None, "batch_cancelled")}
            assert len(engine.cancelled) == 2
            await client.files.delete(batch.input_file_id)

    run_async(test())


def test_time_that_is_over(tmp_path: Path) -> None:
    """One line is finished before. A later server has the remaining time, in which another line begins and does not
    end."""

    async def test() -> None:
        engine = FakeEngine()
        engine.pauses_after = 4
        async with batching(tmp_path, engine, batch_size=1) as client:
            batch = await begun(client, [line("a", max_tokens=1), line("b", max_tokens=5), line("c")])
            while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
                await asyncio.sleep(0.002)
        left_s = batch.expires_at - time.time() - 0.05
        engine = FakeEngine()
        engine.pauses_after = 1
        async with batching(tmp_path, engine, batch_size=1, clock=lambda: time.time() + left_s) as client:
            batch = await ended(client, batch.id)
            assert (batch.status, batch.expired_at >= batch.expires_at - 1) == ("expired", True)  # whole seconds
            assert [answer["custom_id"] for answer in await lines_of(client, batch.output_file_id)] == ["a"]
            errors = await lines_of(client, batch.error_file_id)
            assert [(answer["custom_id"], answer["error"]["code"]) for answer in errors] == [
                ("b", "batch_expired"), ("c", "batch_expired"),
            ]  # fmt: skip

    run_async(test())


def test_lines_wait_for_an_engine_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.server.batches.jobs.PAUSE_S", 0.002)

    async def test() -> None:
        engine = FakeEngine()
        engine.speaks.clear()
        async with batching(tmp_path, engine) as client:
            batch = await begun(client, [line(str(i), prompt=[i + 1]) for i in range(20)])
            while len(engine.submitted) < 20:
                await asyncio.sleep(0.002)
            engine.crash()
            await asyncio.sleep(0.02)
            assert (await client.batches.retrieve(batch.id)).request_counts.completed == 0
            engine.info = READY
            while len(engine.submitted) == 20:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
            assert len(engine.submitted) == 21  # each alone, because one of them may have ended the engine
            engine.speaks.set()
            assert (await ended(client, batch.id)).request_counts.completed == 20

    run_async(test())


@pytest.mark.long
@each("name", ["write_atomically", "open_journal", "_append", "_undone"])
@each("moment", [1, 2, 3])
def test_a_disk_that_fails_for_a_while(
    name: str, moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At each write of a batch and of its files: the batch continues, and each line is in the output once."""
    monkeypatch.setattr(batch_jobs, "RETRY_S", 0.01)
    works, num_calls = getattr(batch_jobs, name), 0

    def fails_once(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == moment + (name == "write_atomically"):  # except the first: the batch is refused then
            raise OSError(28, "No space left on device")
        return works(*arguments)

    async def test() -> None:
        async with batching(tmp_path) as client:
            monkeypatch.setattr(batch_jobs, name, fails_once)
            batch = await ended(client, (await begun(client, [line(str(i)) for i in range(9)])).id)
            assert (batch.status, batch.request_counts.completed) == ("completed", 9)
            assert [answer["custom_id"] for answer in await lines_of(client, batch.output_file_id)] == list("012345678")

    run_async(test())
    assert not list(tmp_path.rglob("journal.jsonl"))
    assert ("continues in 0.01 s: [Errno 28] No space left" in caplog.text) == (
        num_calls >= moment + (name == "write_atomically")
    )


def test_a_refusal_of_the_engine_is_the_error_of_the_line(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.refusal = EngineRefused("this request was running when the engine crashed")
        async with batching(tmp_path, engine) as client:
            batch = await ended(client, (await begun(client, [line("a")])).id)
            (error,) = await lines_of(client, batch.error_file_id)
            assert error["response"]["status_code"] == 400
            assert batch.output_file_id is None

    run_async(test())


def test_batches_hold_no_places_of_others(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.speaks.clear()
        config = {"batch_size": 2, "max_waiting": 0, "request_timeout_s": 0.05}
        async with batching(tmp_path, engine, **config) as client:
            first, second = await begun(client, [line(str(i)) for i in range(9)]), await begun(client, [line("x")])
            while len(engine.submitted) < 2:
                await asyncio.sleep(0.002)
            with pytest.raises(openai.InternalServerError, match="took longer"):  # not 429
                await client.completions.create(model="tiny", prompt=[1], n=2)
            engine.speaks.set()
            assert (await ended(client, second.id)).status == "completed"
            assert (await client.batches.retrieve(first.id)).status == "in_progress"  # lines of both in turn
            assert (await ended(client, first.id)).request_counts.completed == 9

    run_async(test())


def test_the_folder_is_one_servers(tmp_path: Path) -> None:
    async def test() -> None:
        async with batching(tmp_path):
            with pytest.raises(ValueError, match="is used by another server: give another folder"):
                BatchJobs(tmp_path, 1, 1)
        await BatchJobs(tmp_path, 1, 1).close()

    run_async(test())


@pytest.mark.long
def test_batches_of_a_killed_server_end_in_the_next_ones(tmp_path: Path) -> None:
    """SIGKILL twice, and SIGTERM, in the middle of 3,000 lines: each is answered once, and requests have precedence."""
    num_lines, id = 3_000, ""
    lines = [line(str(i), prompt=[i % 500 + 3, i // 500 + 3], max_tokens=1, temperature=0) for i in range(num_lines)]
    ends = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]
    for run in range(4):
        with served(tmp_path / f"run{run}", f"serve.batches={tmp_path / 'batches'}") as (process, url):
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                if run == 0:
                    file = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
                    asked: Any = {"endpoint": ENDPOINT, "completion_window": "24h"}
                    id = client.batches.create(input_file_id=file.id, **asked).id
                most = num_lines * (run + 1) // 5 if run < 3 else num_lines
                while (done := count_of(client.batches.retrieve(id))) < most:
                    time.sleep(0.05)
                if run < 3:
                    assert done < num_lines
                    client.completions.create(model="tiny", prompt="Once", max_tokens=8)
                    assert client.batches.retrieve(id).status == "in_progress"
                    assert ended_by_signal(process, ends[run]) == ((0, "") if run == 2 else (-signal.SIGKILL, ""))
                    continue
                while (batch := client.batches.retrieve(id)).status != "completed":
                    time.sleep(0.05)
                assert batch.error_file_id is None
                assert batch.output_file_id is not None
                answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
                alone = client.completions.create(model="tiny", prompt=[10, 3], max_tokens=1, temperature=0)
                assert httpx.delete(f"{url}/v1/files/{batch.output_file_id}").json()["deleted"]
            assert ended_by_signal(process) == (0, "")
    assert [answer["custom_id"] for answer in answers] == [str(i) for i in range(num_lines)]
    assert answers[7]["response"]["body"]["choices"] == [choice.to_dict() for choice in alone.choices]


def count_of(batch: Any) -> int:
    return batch.request_counts.completed if batch.request_counts else 0


def test_batches_are_of_routes_that_there_are() -> None:
    assert set(get_args(BatchRequest.model_fields["endpoint"].annotation)) <= set(ROUTES)
