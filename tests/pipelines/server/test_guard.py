"""Requests that never pass: wrong hosts, keys, types, sizes. Every rejection has OpenAI's shape and the request's
id."""

import asyncio
import hmac
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from conf.errors import UserError
from conf.serving import ServeConfig
from pipelines.server.api.errors import ApiError
from pipelines.server.guard import check_host, read_admin_keys, read_keys
from pipelines.server.hosts import HostRule
from pipelines.server.records import RequestLog
from tests.helpers.cases import each
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import asking, echoing, service_of
from tests.helpers.serving import run_async

KEYS = {"alice": b"secret-1", "bob": b"secret-2"}
BODY = {"ids": [5, 6]}


def ask(
    method: str = "POST",
    path: str = "/v1/echo",
    keys: dict[str, bytes] | None = None,
    config: Any = None,
    **request: Any,
) -> httpx.Response:
    async def asked() -> httpx.Response:
        app = echoing(service_of(FakeEngine(), **(config or {})), keys)
        async with asking(app) as client:
            return await client.request(method, path, **request)

    return run_async(asked())


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return error


def test_a_good_request_passes() -> None:
    answer = ask(json=BODY)
    assert (answer.status_code, answer.json()) == (200, {"text": "t5 t6 "})
    assert len(answer.headers["x-request-id"]) == 32


def test_a_given_id_is_kept_and_a_bad_one_replaced() -> None:
    assert ask(json=BODY, headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
    for bad in ("a b", "x" * 129, ""):
        assert len(ask(json=BODY, headers={"x-request-id": bad}).headers["x-request-id"]) == 32


@each("host", ["127.0.0.1:8000", "localhost", "[::1]:99", "LOCALHOST:1", "model.lan", "127.0.0.1"])
def test_known_hosts(host: str) -> None:
    assert ask(json=BODY, headers={"host": host}, config={"allowed_hosts": ["model.lan"]}).status_code == 200


@each("host", ["evil.example", "10.0.0.1", "127.0.0.1.evil.example", "", "localhost.", "a@localhost"])
def test_other_hosts_are_refused(host: str) -> None:
    answer = ask(json=BODY, headers={"host": host})
    assert answer.status_code == 421
    assert "serve.allowed_hosts" in error_of(answer)["message"]


def test_host_and_content_type_may_be_missing_where_http_allows_it() -> None:
    """HTTP/1.0 has no Host; a POST without a body needs no content type (openai-node's batches.cancel); HEAD is GET
    without a body."""
    HostRule([]).check({"http_version": "1.0"}, None)
    with pytest.raises(ApiError, match="the header Host is missing"):
        HostRule([]).check({"http_version": "1.1"}, None)
    assert ask("POST", "/v1/nothing").status_code == 404
    assert ask("HEAD", "/v1/models").status_code == ask("GET", "/v1/models").status_code


@each(
    "headers", [{}, {"authorization": "Bearer secret-3"}, {"authorization": "secret-1"}, {"authorization": "Bearer "},
                {"authorization": "Bearer secret-1x"}, {"x-api-key": "secret-1"}, {"authorization": "Bearer \xff"}]
)  # fmt: skip
def test_without_a_right_key(headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = ask(json=BODY, keys=KEYS, headers=encoded)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert error_of(answer)["code"] == "invalid_api_key"
    assert "secret" not in answer.text


@each("key", ["secret-1", "secret-2"])
def test_with_a_right_key(key: str) -> None:
    assert ask(json=BODY, keys=KEYS, headers={"authorization": f"bearer {key}"}).status_code == 200
    # as Anthropic's client sends it
    assert ask("GET", "/v1/models", keys=KEYS, headers={"x-api-key": key}).status_code != 401
    assert ask("GET", "/v1/models", keys=KEYS, headers={"x-api-key": f"{key}x"}).status_code == 401


@each("sent_key", ["secret-1", "secret-2", "wrong", ""])
def test_a_key_is_compared_with_all_in_constant_time(sent_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a match, and with a function whose time does not depend on where two keys differ."""
    compared: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return original(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    ask(json=BODY, keys=KEYS, headers={"authorization": f"Bearer {sent_key}"})
    assert compared == [(key, sent_key.encode()) for key in KEYS.values()]


def test_names_of_keys_are_written_down_and_values_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def asked() -> bytes:
        service = service_of(FakeEngine())
        service._log = RequestLog(tmp_path / "requests.jsonl")
        async with asking(echoing(service, KEYS)) as client:
            for key, body in (("secret-1", BODY), ("secret-2", BODY), ("secret-2", {"no": "ids"}), ("secret-9", BODY)):
                await client.post("/v1/echo", json=body, headers={"authorization": f"Bearer {key}"})
        return service.metrics.text()

    metrics, written = run_async(asked()).decode(), (tmp_path / "requests.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert [(line["key"], line["status"]) for line in lines] == [("alice", 200), ("bob", 200), ("bob", 500)]
    assert 'quintet:tokens_total{key="alice",model_name="tiny"}' in metrics
    assert "KeyError" in caplog.text  # of the third
    assert "secret" not in written + metrics + caplog.text


@each("content", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_other_types_of_bodies(content: str) -> None:
    """Types that a page from another origin may send without a preflight request."""
    answer = ask(content=b"{}", headers={"content-type": content})
    assert answer.status_code == 415
    assert "application/json" in error_of(answer)["message"]


def test_bodies_that_are_too_long() -> None:
    async def chunks() -> Any:
        for _ in range(11):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    for content in (b" " * 1001, chunks()):
        answer = ask(content=content, headers=headers, config={"max_body": "1000"})
        assert answer.status_code == 413
        assert "serve.max_body" in error_of(answer)["message"]
    assert ask(json=BODY, config={"max_body": "1000"}).status_code == 200


def test_headers_that_are_too_long() -> None:
    assert ask(json=BODY, headers={"x-more": "x" * 33000}).status_code == 431


def test_a_body_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.server.guard.BODY_S", 0.01)

    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    answer = ask(content=slow(), headers={"content-type": "application/json"})
    assert answer.status_code == 400  # an SDK repeats a request after 408
    assert "arrive" in error_of(answer)["message"]


def test_a_route_that_there_is_not_waits_for_no_body() -> None:
    async def never() -> Any:
        await asyncio.get_running_loop().create_future()
        yield b""

    assert ask(path="/v1/nothing", content=never(), headers={"content-type": "application/json"}).status_code == 404


@each(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/echo", 405)])
def test_unknown_paths_and_methods_are_named(method: str, path: str, status: int) -> None:
    answer = ask(method, path)
    assert answer.status_code == status
    assert path in error_of(answer)["message"]


def test_a_bug_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(json={"no": "ids"})  # a KeyError in the test's route
    assert answer.status_code == 500
    assert error_of(answer)["message"] == "the server failed: its log says why"
    assert "KeyError" in caplog.text


def test_keys_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUINTET_API_KEYS", raising=False)
    assert read_keys(None) == {}
    file = tmp_path / "keys"
    file.write_text("# a comment\nalice secret-1\n\n  bob\tsecret-2 \n")
    assert read_keys(str(file)) == KEYS
    monkeypatch.setenv("QUINTET_API_KEYS", "alice secret-1\nbob secret-2")
    assert read_keys(None) == KEYS
    monkeypatch.setenv("QUINTET_API_KEYS", "eve secret-3")
    assert read_keys(str(file)) == KEYS
    assert "QUINTET_API_KEYS" not in os.environ  # the engine's process and the template process inherit it
    check_admin_keys(monkeypatch, str(file))


def check_admin_keys(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.delenv("QUINTET_ADMIN_KEYS", raising=False)
    below = ServeConfig(adapter_folders=["/adapters"])
    assert read_admin_keys(ServeConfig(), KEYS) == {}
    with pytest.raises(
        UserError, match=r"serve.adapter_folders needs keys of admins: give serve.admin_keys=FILE or the"
    ):
        read_admin_keys(below, KEYS)
    assert read_admin_keys(ServeConfig(adapter_folders=["/adapters"], admin_keys=file), {}) == KEYS
    monkeypatch.setenv("QUINTET_ADMIN_KEYS", "root secret-9")
    assert read_admin_keys(below, KEYS) == {"root": b"secret-9"}
    assert "QUINTET_ADMIN_KEYS" not in os.environ
    for keys in ("alice secret-9", "root secret-1"):
        monkeypatch.setenv("QUINTET_ADMIN_KEYS", keys)
        with pytest.raises(
            UserError, match=r"serve.admin_keys: \w+ or its key is also in serve.api_keys: give it once"
        ):
            read_admin_keys(below, KEYS)


def test_a_file_of_keys_that_others_may_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("alice secret-1\n")
    for mode, warns in ((0o600, False), (0o640, False), (0o604, True)):
        file.chmod(mode)
        caplog.clear()
        read_keys(str(file))
        assert ("may be read by every user of this machine" in caplog.text) is warns
        assert "secret" not in caplog.text


@each(
    ("text", "message"),
    [("alice", "line 1 is not a new name and its key"), ("a b c", "line 1"), ("a x\na y", "line 2"), ("\n#\n", "has no keys")],
)  # fmt: skip
def test_bad_files_of_keys(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UserError, match=message):
        read_keys(str(tmp_path / "keys"))
    with pytest.raises(UserError, match="cannot be read"):
        read_keys(str(tmp_path / "none"))


def test_another_address_needs_keys() -> None:
    check_host(ServeConfig(), {})
    check_host(ServeConfig(host="0.0.0.0"), KEYS)
    with pytest.raises(
        UserError, match=r"serve.host=0.0.0.0 is open to other machines and there are no API keys: give serve.api_keys"
    ):
        check_host(ServeConfig(host="0.0.0.0"), {})
