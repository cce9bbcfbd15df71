"""The routes over the fake engine: the list of routes, access, answers, and their description."""

import json
import re
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from conf.errors import UserError
from conf.schema import ModelConfig
from conf.serving import ServeConfig
from models.tokenizers import Tokenizer
from pipelines.replicas.engine_process.frames import Submit
from pipelines.server.service import Service
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.fake_engine import READY, FakeEngine, ready_for
from tests.helpers.local_http import CHAT, URL, app_of, ask, service_of
from tests.helpers.serving import run_async, tokenizer

KEYS = {"alice": b"secret-1"}


def routes() -> list[tuple[str, str]]:
    """Return all routes of the application."""
    guard: Any = app_of_any()
    inner: FastAPI = guard._app
    table = [(method, route.path) for route in inner.routes for method in sorted(route.methods)]  # type: ignore[attr-defined]
    return sorted(table)


def app_of_any() -> ASGIApp:
    async def made() -> ASGIApp:
        return app_of(storing())

    return run_async(made())


def storing() -> Service:
    return service_of(FakeEngine(), response_store="memory")


def test_there_are_not_other_routes() -> None:
    assert set(routes()) == {
        ("GET", "/health"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/ready"), ("GET", "/v1/models"),
        ("GET", "/v1/models/{model:path}"), ("GET", "/version"), ("POST", "/detokenize"), ("POST", "/tokenize"),
        ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/embeddings"),
        ("POST", "/v1/rerank"), ("POST", "/rerank"), ("POST", "/v2/rerank"), ("POST", "/v1/score"), ("POST", "/score"),
        ("POST", "/classify"), ("POST", "/pooling"),
        ("POST", "/v1/responses"), ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses/input_tokens"), ("GET", "/v1/responses/{response_id}"),
        ("DELETE", "/v1/responses/{response_id}"), ("POST", "/v1/responses/{response_id}/cancel"),
        ("GET", "/v1/responses/{response_id}/input_items"),
        ("POST", "/v1/files"), ("GET", "/v1/files"),
        ("GET", "/v1/files/{file_id}"), ("DELETE", "/v1/files/{file_id}"), ("GET", "/v1/files/{file_id}/content"),
        ("POST", "/v1/batches"), ("GET", "/v1/batches"), ("GET", "/v1/batches/{batch_id}"),
        ("POST", "/v1/batches/{batch_id}/cancel"),
        ("POST", "/v1/load_lora_adapter"), ("POST", "/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"), ("POST", "/unload_lora_adapter"),
    }  # fmt: skip


@pytest.mark.long
@each(("method", "path"), routes())
def test_every_route_but_two_needs_a_key(method: str, path: str) -> None:
    path = path.replace("{model:path}", "tiny")
    without = ask(method, path, storing(), KEYS, json={})
    assert (without.status_code == 401) == (path not in ("/health", "/ready"))
    wrong = ask(method, path, storing(), KEYS, json={}, headers={"authorization": "Bearer secret-2"})
    assert wrong.status_code == without.status_code
    right = ask(method, path, storing(), KEYS, json={}, headers={"authorization": "Bearer secret-1"})
    assert right.status_code in (
        (404,)
        if "{" in path
        else (415,)
        if path == "/v1/files" and method == "POST"
        else (403,)
        if path.endswith("_lora_adapter")
        else (200, 400)
    )


def encoded_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the texts that are encoded from now on."""
    encoded: list[str] = []
    encode = type(tokenizer()).encode

    def noting(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(type(tokenizer()), "encode", noting)
    return encoded


TOO_LONG = (
    r"maximum context length is 64 tokens for prompt and answer together, and the prompt has at least \d+ tokens: "
    r"shorten it"
)


def test_a_text_longer_than_any_context_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    most, encoded = READY.context_length * (tokenizer().max_token_bytes or 0), encoded_texts(monkeypatch)
    texts: list[tuple[str, dict[str, Any], str | None]] = [
        ("/v1/completions", {"prompt": ["a", "TEXT"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}, "messages"),
        ("/v1/responses", {"input": "TEXT", "store": False}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 1}, None),
        ("/v1/embeddings", {"input": "TEXT"}, "input"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "TEXT"]}, "documents"),
        ("/classify", {"input": "TEXT"}, "input"),
        ("/pooling", {"messages": [{"role": "user", "content": "TEXT"}]}, "messages"),
    ]
    for path, body, param in texts:
        for num_bytes, is_encoded in ((most - 100, True), (most + 1, False)):
            asked = json.loads(json.dumps(body).replace("TEXT", "x" * num_bytes)) | {"model": "tiny"}
            answer = ask("POST", path, service_of(FakeEngine(**ready_for(path))), json=asked)
            assert any("xxx" in text for text in encoded) == is_encoded
            encoded.clear()
            if not is_encoded:
                error = answer.json()["error"]
                assert answer.status_code == 400
                assert re.search(TOO_LONG, error["message"])
                assert param is None or (error["param"], error["code"]) == (param, "context_length_exceeded")
    response = ask("POST", "/tokenize", json={"prompt": "x" * (most + 1)})
    assert response.json()["count"] > READY.context_length  # only counts


def test_a_text_of_a_full_server_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encoded_texts(monkeypatch)
    for path, body in {
        "/v1/completions": {"prompt": "hello"},
        "/v1/chat/completions": CHAT,
        "/v1/responses": {"input": "hello"},
        "/v1/messages": CHAT,
        "/v1/embeddings": {"input": "hello"},
        "/classify": {"input": "hello"},
        "/tokenize": {"prompt": "hello"},
    }.items():
        busy = service_of(FakeEngine(**ready_for(path)), max_waiting_tokens=5)
        busy.admission.wait(5)
        assert ask("POST", path, busy, json=body | {"model": "tiny"}).status_code == 429
        assert not encoded
        for is_full in (True, False):
            service = service_of(FakeEngine(**ready_for(path)), batch_size=1, max_waiting=0)
            with service.admission.place(is_full, 60.0):
                answer = ask("POST", path, service, json=body | {"model": "tiny"})
            assert (answer.status_code == 429, bool(encoded)) == (is_full, not is_full)
        encoded.clear()


def test_state() -> None:
    engine = FakeEngine()
    service = service_of(engine)
    assert ask("GET", "/health", service).json() == {"status": "ok"}
    assert ask("GET", "/ready", service).json() == {"status": "ready"}
    assert set(ask("GET", "/version", service).json()) == {"version"}
    service.is_draining = True
    assert ask("GET", "/health", service).status_code == 200
    assert (answer := ask("GET", "/ready", service)).status_code == 503
    assert answer.json()["error"]["code"] == "draining"
    service.is_draining, engine.info = False, None
    assert ask("GET", "/health", service).status_code == 200
    for method, path, body in (
        ("GET", "/ready", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/chat/completions", CHAT),
    ):
        answer = ask(method, path, service, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")


@each(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", CHAT),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/score", {"queries": "hello", "documents": "hello"}),
    ],
)
def test_a_models_name_is_that_of_its_adapter_or_prefix(path: str, body: dict[str, Any]) -> None:
    for name, adapter, prefix in (("fr", "fr", None), ("story", None, "story"), ("tiny", None, None)):
        engine = FakeEngine(**ready_for(path), prefixes={"story": 5})
        service = service_of(engine, {"fr": "/adapters/fr"}, {"story": "/story.npy"})
        answer = ask("POST", path, service, json={**body, "model": name})
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert (engine.submitted[-1].adapter, engine.submitted[-1].prefix) == (adapter, prefix)
    unnamed = {key: value for key, value in body.items() if key != "model"}
    if not ready_for(path):
        assert ask("POST", path, service_of(FakeEngine()), json=unnamed).json()["model"] == "tiny"
        answer = ask("POST", path, service, json=unnamed)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "model is missing: give one of tiny, fr, story"


def test_a_folder_is_named_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY / "models" / "tiny")
    for path in (".", "../tiny/", str(REPOSITORY / "models" / "tiny")):
        assert Service(ModelConfig(path=path), ServeConfig(), FakeEngine()).model_name == "tiny"


def test_adapters_and_prefixes_are_models() -> None:
    service = service_of(FakeEngine(prefixes={"story": 5}), {"fr": "/adapters/fr"}, {"story": "/story.npy"})
    models = ask("GET", "/v1/models", service).json()
    fields = ("id", "root", "parent", "max_model_len", "context_length")
    entries = [tuple(model[field] for field in fields) for model in models["data"]]
    assert entries == [
        ("tiny", "tiny", None, 64, 64),
        ("fr", "/adapters/fr", "tiny", 64, 64),
        ("story", "tiny", "tiny", 59, 59),
    ]
    assert ask("GET", "/v1/models/fr", service).json() == models["data"][1]
    check_anthropics_models(service)
    assert ask("GET", "/v1/models/de", service).json()["error"]["code"] == "model_not_found"
    with pytest.raises(UserError, match="model.adapters=tiny is not allowed: it is the model's own name"):
        service_of(FakeEngine(), {"tiny": "/adapters/fr"})
    with pytest.raises(UserError, match="model.prefixes=tiny is not allowed: it is the model's own name"):
        service_of(FakeEngine(), prefixes={"tiny": "/story.npy"})


def check_anthropics_models(service: Service) -> None:
    async def listed() -> list[anthropic.types.ModelInfo]:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app_of(service)))
        async with anthropic.AsyncAnthropic(api_key="k", base_url=URL, http_client=http) as client:
            assert (await client.models.retrieve("fr")).display_name == "fr"
            before = await client.models.list(before_id="story", limit=1)
            assert ([model.id for model in before.data], before.has_more) == (["fr"], True)
            return [model async for model in client.models.list(limit=2)]

    models = run_async(listed())
    assert [(model.id, model.type, model.max_input_tokens) for model in models] == [
        ("tiny", "model", 64),
        ("fr", "model", 64),
        ("story", "model", 59),
    ]
    assert int(models[0].created_at.timestamp()) == service.created
    for headers, is_anthropics in (
        ({"x-api-key": "k"}, True),
        ({"x-api-key": "k", "authorization": "Bearer k"}, False),
        ({"anthropic-version": "2023-06-01", "authorization": "Bearer k"}, True),
    ):
        answer = ask("GET", "/v1/models", service, headers=headers).json()
        assert ("first_id" in answer, "object" in answer) == (is_anthropics, not is_anthropics)
        answer = ask("GET", "/v1/models?limit=0", service, headers=headers).json()
        assert "limit='0' is not allowed" in answer["error"]["message"]
    for query, param in (("after_id=de&beta=true", "after_id"), ("after_id=fr&before_id=fr", "before_id")):
        answer = ask("GET", f"/v1/models?{query}", service, headers={"x-api-key": "k"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(ask("GET", "/v1/models?client_version=1", service).json()["data"]) == 3


def test_a_prefix_leaves_less_of_the_context() -> None:
    """59 of 64 positions: the default length fits, and longer ones are refused with this number."""
    engine = FakeEngine(prefixes={"story": 5})
    for more, status in (({}, 200), ({"max_tokens": 9}, 200), ({"max_tokens": 10}, 400)):
        body = {"model": "story", "prompt": [7] * 50, **more}
        answer = ask("POST", "/v1/completions", service_of(engine, prefixes={"story": "/story.npy"}), json=body)
        assert answer.status_code == status
        assert engine.submitted[-1].decode["max_new_tokens"] == 9  # type: ignore[union-attr]
    assert "together more than the model's 59: give at most 9" in answer.json()["error"]["message"]


def test_tokens() -> None:
    ids = tokenizer().encode("Once upon a time", True)
    answer = ask("POST", "/tokenize", json={"prompt": "Once upon a time", "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 64)
    assert "".join(answer["token_strs"][1:]) == "Once upon a time"
    plain = ask("POST", "/tokenize", json={"prompt": "Once", "add_special_tokens": False}).json()
    assert plain["tokens"] == tokenizer().encode("Once", False)
    chat = ask("POST", "/tokenize", json={"messages": CHAT["messages"]}).json()
    assert chat["tokens"] == tokenizer().encode_messages([{"role": "user", "content": "hi"}], None)[1]
    begun = ask("POST", "/tokenize", json={"messages": CHAT["messages"], "continue_final_message": True}).json()
    assert tokenizer().decode(begun["tokens"], skip_special_tokens=False).endswith("user\nhi")
    assert ask("POST", "/tokenize", json={"prompt": "a", "continue_final_message": True}).status_code == 400
    assert ask("POST", "/detokenize", json={"tokens": ids[1:]}).json() == {"prompt": "Once upon a time"}
    assert ask("POST", "/detokenize", json={"tokens": [10**6]}).json()["error"]["param"] == "tokens"
    assert ask("POST", "/tokenize", json={"prompt": "a", "messages": CHAT["messages"]}).status_code == 400
    assert ask("POST", "/tokenize", json={"prompt": "a", "model": "none"}).status_code == 404


def test_prompts_over_the_waiting_limit_run_alone() -> None:
    """They are not told to come again forever; each counts while it waits."""
    body = {"model": "tiny", "prompt": [[11, 12, 13], [14, 15, 16], [17, 18, 19]], "max_tokens": 3}
    service = service_of(FakeEngine(), max_waiting_tokens=5)
    answer = ask("POST", "/v1/completions", service, json=body)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["t11 t12 t13 ", "t14 t15 t16 ", "t17 t18 t19 "]
    assert service.admission.num_waiting_tokens == 0
    for prompts, status in ((body["prompt"], 429), ([[11, 12], [13, 14]], 200)):
        service = service_of(FakeEngine(), max_waiting_tokens=5)
        service.admission.wait(1)
        assert ask("POST", "/v1/completions", service, json={**body, "prompt": prompts}).status_code == status


@each(("path", "body"), [("/v1/messages", CHAT), ("/v1/responses", {"model": "tiny", "input": "hi"})])
def test_routes_of_one_answer_have_one(path: str, body: dict[str, Any]) -> None:
    """Also if the server's settings request more. Of the server's beams it is the best one."""
    for decode, config, name in (
        ({"n": 3, "temperature": 1.0}, {"batch_size": 1, "max_waiting": 0}, "n"),
        ({"num_beams": 4, "num_return_sequences": 2}, {}, "num_return_sequences"),
    ):
        engine = FakeEngine(decode=decode)
        assert ask("POST", path, service_of(engine, **config), json=body).status_code == 200
        (submit,) = engine.submitted
        assert isinstance(submit, Submit)
        assert submit.decode[name] == 1


@each(
    ("decode", "asked", "num_places"),
    [
        ({"n": 3}, {}, 3),
        ({"n": 3}, {"n": 2}, 2),
        ({"num_beams": 4, "num_return_sequences": 2}, {}, 4),
        ({}, {"n": 2}, 2),
        ({}, {}, 1),
    ],
)
def test_a_request_takes_a_place_for_each_of_its_sequences(
    decode: dict[str, Any], asked: dict[str, Any], num_places: int
) -> None:
    """Including sequences that the server's settings request."""
    messages = {**CHAT, "temperature": 1}
    for path, body, num_prompts in (
        ("/v1/chat/completions", messages | asked, 1),
        ("/v1/completions", {"model": "tiny", "prompt": [[11], [12]], "max_tokens": 3} | asked, 2),
    ):
        service = service_of(FakeEngine(decode=decode), batch_size=1, max_waiting=0)
        service.admission.max_sequences = num_prompts * num_places - 1
        refused = ask("POST", path, service, json=body)
        assert refused.status_code == 400
        assert f"the request has {num_prompts * num_places} sequences" in refused.text
        service = service_of(FakeEngine(decode=decode), batch_size=1, max_waiting=0)
        service.admission.max_sequences = num_prompts * num_places
        assert ask("POST", path, service, json=body).status_code == 200


def test_openais_client() -> None:
    async def test() -> None:
        engine = FakeEngine()
        http_client = httpx.AsyncClient(transport=httpx.ASGITransport(app_of(service_of(engine), KEYS)))
        client = openai.AsyncOpenAI(api_key="secret-1", base_url=f"{URL}/v1", http_client=http_client, max_retries=0)
        answer = await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        words = "".join(f"t{token} " for token in engine.submitted[0].prompt_token_ids[:3])
        assert answer.choices[0].message.content == words
        assert answer._request_id == answer.id.removeprefix("chatcmpl-")
        stream = await client.chat.completions.create(**CHAT, stream=True)  # type: ignore[call-overload]
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == words
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**CHAT, extra_body={"nope": 1})  # type: ignore[call-overload]
        assert refused.value.param == "nope"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**{**CHAT, "model": "none"})  # type: ignore[call-overload]
        engine.speaks.clear()
        with pytest.raises(openai.InternalServerError) as late:  # its own read timeout is the deadline
            await client.with_options(timeout=httpx.Timeout(9, read=0.05)).chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert late.value.status_code == 504
        assert [name async for name in _names(client)] == ["tiny"]

    run_async(test())


async def _names(client: openai.AsyncOpenAI) -> Any:
    async for model in client.models.list():
        yield model.id


def test_metrics_have_vllms_names() -> None:
    engine = FakeEngine()
    service = service_of(engine)
    assert ask("POST", "/v1/chat/completions", service, json=CHAT).status_code == 200
    text = ask("GET", "/metrics", service).text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'vllm:generation_tokens_total{model_name="tiny"} 3.0' in text
    for name in (
        "e2e_request_latency_seconds_bucket", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
        "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_max_num_generation_tokens_bucket",
        "prompt_tokens_total", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
        "prefix_cache_queries_total", "prefix_cache_hits_total",
    ):  # fmt: skip
        assert f"vllm:{name}{{" in text, name
    assert 'vllm:iteration_tokens_total_bucket{le="16384.0",model_name="tiny"} 0.0' in text
    engine.say(num_steps=[4, 0, 2, *[0] * 10, 1], num_step_tokens=20_030)
    text = ask("GET", "/metrics", service).text
    for name, value in (
        *(
            (f'bucket{{le="{le}",model_name="tiny"}}', n)
            for le, n in (("1.0", 4), ("8.0", 4), ("16.0", 6), ("+Inf", 7))
        ),
        ('count{model_name="tiny"}', 7),
        ('sum{model_name="tiny"}', 20_030),
    ):
        assert f"vllm:iteration_tokens_total_{name} {value}.0\n" in text, name


def test_pages_from_elsewhere() -> None:
    origin = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in ask("OPTIONS", "/v1/chat/completions", headers=origin).headers
    allowed = service_of(FakeEngine(), allowed_origins=["https://page.example"])
    answer = ask("OPTIONS", "/v1/chat/completions", allowed, KEYS, headers=origin)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    other = ask("OPTIONS", "/v1/chat/completions", allowed, headers={**origin, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_the_description_names_every_route_and_body() -> None:
    document = ask("GET", "/openapi.json", storing()).json()
    described = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    assert described == {(method, path.replace(":path", "")) for method, path in routes()}
    assert "422" not in json.dumps(document["paths"])
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= document["components"]["schemas"].keys()
    assert {"ChatRequest", "CompletionRequest", "ErrorBody"} <= references
    streams = {path for path, operations in document["paths"].items() if "text/event-stream" in json.dumps(operations)}
    assert streams == {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
