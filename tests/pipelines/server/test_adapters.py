"""LoRA adapters that are loaded and unloaded over HTTP: vLLM's and SGLang's forms, keys, names, and requests in flight."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from pipelines.replicas.engine_process.client import EngineGone, EngineRefused
from pipelines.server.service import Service
from tests.helpers.cases import each
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import app_of, asking, service_of
from tests.helpers.serving import run_async

KEYS, ADMINS = {"alice": b"client"}, {"root": b"admin"}
ADMIN = {"authorization": "Bearer admin"}
FOLDERS = ["/adapters"]


def service(engine: FakeEngine, **config: Any) -> Service:
    return service_of(engine, {"start": "/start"}, {"story": "/story.npy"}, adapter_folders=FOLDERS, **config)


@asynccontextmanager
async def admin_of(service: Service, headers: dict[str, str] = ADMIN) -> AsyncIterator[httpx.AsyncClient]:
    async with asking(app_of(service, KEYS, ADMINS), headers=headers) as client:
        yield client


async def load(
    client: httpx.AsyncClient, name: str = "fr", path: str = "/adapters/fr", **fields: Any
) -> httpx.Response:
    return await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


async def unload(client: httpx.AsyncClient, name: str = "fr") -> httpx.Response:
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def listed(client: httpx.AsyncClient) -> dict[str, tuple[str, str | None]]:
    models = (await client.get("/v1/models")).json()["data"]
    return {model["id"]: (model["root"], model["parent"]) for model in models}


def error_of(answer: httpx.Response, status: int, param: str | None) -> str:
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    message: str = answer.json()["error"]["message"]
    assert "\n" not in message
    return message


async def check_forms(engine: FakeEngine) -> None:
    """The answers of vLLM's and SGLang's paths, the list of models, and names in use."""
    async with admin_of(service(engine)) as client:
        answer = await load(client)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'fr' added successfully.")
        models = {"tiny": ("tiny", None), "start": ("/start", "tiny"), "story": ("tiny", "tiny")}
        assert await listed(client) == models | {"fr": ("/adapters/fr", "tiny")}
        body = {"lora_name": "de", "lora_path": "de", "pinned": True}
        assert (await client.post("/load_lora_adapter", json=body)).json() == {
            "success": True,
            "error_message": "",
            "loaded_adapters": {"de": "de", "fr": "/adapters/fr", "start": "/start"},
        }
        for name in ("fr", "start", "tiny", "story"):
            assert f"lora_name={name} is in use" in error_of(await load(client, name), 400, "lora_name")
        for name in ("tiny", "story"):
            assert "is in use" in error_of(await load(client, name, load_inplace=True), 400, "lora_name")
        assert (
            await load(client, path="/adapters/other", load_inplace=True, is_3d_lora_weight=False)
        ).status_code == 200
        assert (await listed(client))["fr"] == ("/adapters/other", "tiny")
        answer = await unload(client, "start")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'start' removed successfully.")
        body = {"lora_name": "de"}
        loaded_adapters = (await client.post("/unload_lora_adapter", json=body)).json()["loaded_adapters"]
        assert loaded_adapters == {"fr": "/adapters/other"}
        for name, shown in (("de", "de"), ("d\ne", "d e")):
            message = f"lora_name={shown} does not exist: there are fr"
            assert error_of(await unload(client, name), 404, "lora_name") == message
        answer = await client.post("/v1/completions", json={"model": "de", "prompt": [5]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert len(engine.adapters) == 1


async def check_keys(engine: FakeEngine) -> None:
    """Adapters need the key of an admin, also if all other routes need none."""
    changes = [f"{prefix}/{change}_lora_adapter" for prefix in ("/v1", "") for change in ("load", "unload")]
    for keys, presented, status in (
        (KEYS, None, 401),
        (KEYS, "none", 401),
        (KEYS, "client", 403),
        (KEYS, "admin", 200),
        ({}, None, 401),
        ({}, "client", 401),
        ({}, "admin", 200),
    ):
        headers = {} if presented is None else {"authorization": f"Bearer {presented}"}
        async with asking(app_of(service(engine), keys, ADMINS), headers=headers) as client:
            for path in changes:
                body = {"lora_name": "fr"} | ({} if "unload" in path else {"lora_path": "fr"})
                assert (await client.post(path, json=body)).status_code == status
            is_known = not keys or presented in ("client", "admin")
            assert (await client.get("/v1/models")).status_code == (200 if is_known else 401)
    disabled = "this server loads no adapters while it runs: start the server with serve.adapter_folders=[FOLDER]"
    for is_service, admins in ((service(engine), {}), (service_of(engine), ADMINS)):
        async with asking(app_of(is_service, {}, admins), headers=ADMIN) as client:
            assert disabled in error_of(await load(client), 403, None)
            assert disabled in error_of(await unload(client), 403, None)


async def check_failures(engine: FakeEngine) -> None:
    """An engine that refuses an adapter or is lost changes nothing."""
    is_service = service(engine)
    async with admin_of(is_service) as client:
        await load(client)
        before = await listed(client), engine.adapters
        for error, status, param in (
            (EngineRefused("not there", is_missing=True), 404, "lora_path"),
            (EngineRefused("damaged"), 400, "lora_path"),
            (EngineGone("the engine was lost"), 503, None),
        ):
            engine.adapter_refusal = error
            for fields in ({"name": "new"}, {"load_inplace": True}):
                assert str(error) in error_of(await load(client, **fields), status, param)
            assert (await listed(client), engine.adapters) == before
        engine.adapter_refusal = None
        answers = await asyncio.gather(*(load(client, "new") for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409, 409]
        assert "lora_name=new is being loaded or unloaded" in error_of(answers[-1], 409, "lora_name")
        for name in ("a", "b", "c", "d", "e", "f", "g"):
            assert (await load(client, name, pinned=True)).status_code == 200
        refused = error_of(await load(client, "h", pinned=True), 400, "pinned")
        assert "7 adapters are pinned, and one slot of model.max_adapters must remain" in refused
        assert (await load(client, "g", pinned=True, load_inplace=True)).status_code == 200
        assert (await unload(client, "g")).status_code == 200
        assert (await load(client, "h", pinned=True)).status_code == 200
        # A restarted engine could not load it again.
        await engine.unload_adapter(is_service.adapters.find("h").engine_name)  # type: ignore[union-attr]
        assert "h" not in await listed(client)
        assert (await client.post("/v1/completions", json={"model": "h", "prompt": [5]})).status_code == 404
        error_of(await unload(client, "h"), 404, "lora_name")
        assert (await load(client, "h", pinned=True)).status_code == 200
        engine.info = None
        assert (await load(client, "z")).json()["error"]["code"] == "loading"


async def check_requests_in_flight(engine: FakeEngine) -> None:
    """They keep the version that they began with. Unloading waits for them."""
    async with admin_of(service(engine)) as client:
        await load(client)
        body = {"model": "fr", "prompt": [5, 6], "max_tokens": 4}
        engine.speaks.clear()
        first = asyncio.create_task(client.post("/v1/completions", json=body))
        while not engine.submitted:
            await asyncio.sleep(0)
        assert (await load(client, path="/adapters/new", load_inplace=True)).status_code == 200
        second = asyncio.create_task(client.post("/v1/completions", json=body))
        while len(engine.submitted) < 2:
            await asyncio.sleep(0)
        names = [submit.adapter for submit in engine.submitted]
        assert names[0] != names[1]
        assert [engine.adapters[str(name)] for name in names] == ["/adapters/fr", "/adapters/new"]
        unloading = asyncio.create_task(unload(client))
        while "fr" in await listed(client):
            await asyncio.sleep(0)
        assert "is being loaded or unloaded" in error_of(await load(client), 409, "lora_name")
        assert (await client.post("/v1/completions", json=body)).status_code == 404
        assert set(names) <= engine.adapters.keys()
        assert not unloading.done()
        engine.speaks.set()
        assert [(await answer).status_code for answer in (first, second, unloading)] == [200] * 3
        assert engine.adapters == {"start": "/start"}
        fingerprints = [(await answer).json()["system_fingerprint"] for answer in (first, second)]
        assert len({*fingerprints, "fake"}) == 3


async def check_refused_requests(engine: FakeEngine) -> None:
    """Unloading does not wait for them."""
    async with admin_of(service(engine, response_store="memory")) as client:
        await load(client)
        for path, body in (
            ("/classify", {}),
            ("/score", {"queries": "a", "text_1": "a", "documents": "b"}),
            ("/v1/responses", {"input": "a", "background": True, "stream": True}),
            ("/v1/responses", {"input": "a", "background": True, "store": False}),
            ("/v1/responses", {"input": "a", "previous_response_id": "none"}),
        ):
            assert (await client.post(path, json={"model": "fr", **body})).status_code == 400
        assert (await unload(client)).status_code == 200


async def check_bodies(engine: FakeEngine) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "lora_name is missing"),
        ({"lora_name": "fr"}, "lora_path is missing"),
        ({"lora_name": "", "lora_path": "fr"}, "lora_name='' is not allowed"),
        ({"lora_name": "x" * 257, "lora_path": "fr"}, "lora_name="),
        ({"lora_name": "fr", "lora_path": "x" * 4097}, "lora_path="),
        ({"lora_name": 5, "lora_path": "fr"}, "lora_name=5 is not allowed"),
        ({"lora_name": "fr", "lora_path": ["fr"]}, "lora_path="),
        ({"lora_name": "fr", "lora_path": "fr", "load_inplace": "yes"}, "load_inplace='yes' is not allowed"),
        ({"lora_name": "fr", "lora_path": "fr", "is_3d_lora_weight": True}, "is_3d_lora_weight=True is not allowed"),
        ({"lora_name": "fr", "lora_path": "fr", "lora_int_id": 1}, "lora_int_id is not supported"),
    ]
    async with admin_of(service(engine)) as client:
        for body, message in wrong:
            answer = await client.post("/v1/load_lora_adapter", json=body)
            assert message in error_of(answer, 400, answer.json()["error"]["param"])
        for content in (
            b"",
            b"[]",
            b"null",
            b"{",
            b"\xff",
            b'{"lora_name": "\\ud800", "lora_path": "fr"}',
            b"[" * 9999,
        ):
            for path in ("/v1/load_lora_adapter", "/unload_lora_adapter"):
                headers = {"content-type": "application/json"}
                assert (await client.post(path, content=content, headers=headers)).status_code == 400
        assert (await client.get("/v1/load_lora_adapter")).status_code == 405
        assert engine.adapters == {"start": "/start"}


CHECKS = (
    check_forms,
    check_keys,
    check_failures,
    check_requests_in_flight,
    check_refused_requests,
    check_bodies,
)


@each("check", CHECKS)
def test_adapters_over_http(check: Any) -> None:
    run_async(check(FakeEngine(prefixes={"story": 5})))
