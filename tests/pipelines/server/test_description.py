"""Responses and errors match openapi.json, also for generated requests."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, reject, settings, strategies
from hypothesis.errors import Unsatisfiable

from pipelines.server.service import Service
from tests.helpers.cases import each
from tests.helpers.fake_engine import FakeEngine, ready_for
from tests.helpers.local_http import CHAT, app_of, ask, asking, service_of
from tests.helpers.serving import run_async

jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="needs the extra test-clients")
schemathesis = pytest.importorskip("schemathesis", reason="needs the extra test-clients")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.core.errors import InvalidSchema  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.long


async def fresh(scope: Any, receive: Any, send: Any) -> None:
    """Return an application for each request, because each runs in its own loop here."""
    if scope["type"] == "http":
        service = storing(FakeEngine(**ready_for(scope["path"])), adapter_folders=["/adapters"])
        await app_of(service, admins={"root": b"admin"})(scope, receive, send)


def storing(engine: FakeEngine, **config: Any) -> Service:
    return service_of(engine, response_store="memory", **config)


SCHEMA = schemathesis.openapi.from_dict(ask("GET", "/openapi.json", storing(FakeEngine())).json())
SCHEMA.app = fresh
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def validator_of(schema: dict[str, Any]) -> Any:
    """Return a validator of a schema of the description, which resolves its references there."""
    return jsonschema_rs.validator_for({**schema, "components": SCHEMA.raw_schema["components"]})


def check_described(answer: httpx.Response, path: str) -> Any:
    """Check that the response matches the description of this path, and return its JSON."""
    assert answer.status_code == 200, answer.text
    operation = SCHEMA.raw_schema["paths"][path][answer.request.method.lower()]
    validator_of(operation["responses"]["200"]["content"]["application/json"]["schema"]).validate(answer.json())
    return answer.json()


def test_every_answer_of_json_is_described() -> None:
    described = {
        (method, path): operation["responses"]["200"]["content"].get("application/json")
        for path, operations in SCHEMA.raw_schema["paths"].items()
        for method, operation in operations.items()
    }
    free = {place for place, answer in described.items() if answer and not {"$ref", "anyOf"} & answer["schema"].keys()}
    assert free == {("get", "/openapi.json"), ("get", "/v1/files/{file_id}/content")}
    with pytest.raises(jsonschema_rs.ValidationError):
        validator_of(described["post", "/tokenize"]["schema"]).validate({"count": 1, "more": 1})


@each(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        (
            "/v1/chat/completions",
            {**CHAT, "n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
        ),
        ("/v1/chat/completions", {**CHAT, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 0, "echo": True}),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "return_token_ids": True}),
        ("/v1/responses", {"input": "hello", "metadata": {"a": "b"}}),
        ("/v1/responses", {"input": "hello", "tools": [{"type": "mcp", "a": 1}], "reasoning": {"summary": "auto"}}),
        ("/v1/responses/input_tokens", {"input": "hello"}),
        ("/v1/messages", CHAT),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}]}),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/classify", {"input": ["a", "b"]}),
        ("/pooling", {"input": [5, 6], "encoding_format": "base64"}),
        ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
        ("/tokenize", {"messages": CHAT["messages"]}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_answers_are_as_described(path: str, body: dict[str, Any]) -> None:
    service = service_of(FakeEngine(**ready_for(path)))
    answer = check_described(ask("POST", path, service, json={**body, "model": "tiny"}), path)
    if body.get("return_token_ids"):
        assert all(choice["token_ids"] for choice in answer["choices"])


def test_states_files_and_batches_are_as_described() -> None:
    for path in ("/health", "/ready", "/version", "/v1/models"):
        check_described(ask("GET", path), path)
    check_described(ask("GET", "/v1/models/tiny"), "/v1/models/{model}")
    root, adapter = {"headers": {"authorization": "Bearer admin"}}, {"lora_name": "fr", "lora_path": "fr"}
    for path, body in (("/load_lora_adapter", adapter), ("/unload_lora_adapter", {"lora_name": "fr"})):
        service = service_of(FakeEngine(), {"fr": "fr"} if "unload" in path else None, adapter_folders=["/adapters"])
        check_described(ask("POST", path, service, admins={"root": b"admin"}, json=body, **root), path)
    for path in ("/v1/models", "/v1/models/tiny"):
        check_described(ask("GET", path, headers={"x-api-key": "k"}), path.replace("tiny", "{model}"))
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    upload = {"files": {"file": ("a.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
    file = check_described(ask("POST", "/v1/files", **upload), "/v1/files")["id"]
    assert file in [entry["id"] for entry in check_described(ask("GET", "/v1/files"), "/v1/files")["data"]]
    check_described(ask("GET", f"/v1/files/{file}"), "/v1/files/{file_id}")
    check_described(ask("GET", "/v1/batches"), "/v1/batches")
    assert check_described(ask("DELETE", f"/v1/files/{file}"), "/v1/files/{file_id}")["deleted"]


def test_stored_responses_are_as_described() -> None:
    async def test() -> None:
        async with asking(app_of(storing(FakeEngine()))) as client:
            path, body = "/v1/responses/{response_id}", {"input": "hello", "max_output_tokens": 3}
            queued = check_described(
                await client.post("/v1/responses", json=body | {"background": True}), "/v1/responses"
            )
            for method, suffix in (("POST", "/cancel"), ("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
                answer = await client.request(method, path.format(response_id=queued["id"]) + suffix)
                check_described(answer, path + suffix)

    run_async(test())


@strategies.composite
def possible(draw: strategies.DrawFn, cases: strategies.SearchStrategy[Any]) -> Any:
    """Return the cases that can be drawn: some of schemathesis' changes leave a schema without values."""
    try:
        return draw(cases)
    except InvalidSchema:
        reject()


@pytest.mark.long
@each("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@each("operation", [operation.ok() for operation in SCHEMA.get_all_operations()])
def test_requests_by_the_description(operation: Any, mode: GenerationMode) -> None:
    """A request that matches the description, or does not, is answered as described: no undocumented status, no server
    error."""
    content = operation.definition.raw.get("requestBody", {}).get("content", {})
    is_wrong_alone = mode is GenerationMode.NEGATIVE and not content
    checks = CHECKS + [negative_data_rejection] * is_wrong_alone

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=possible(operation.as_strategy(generation_mode=mode)))
    def answered(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and case.body.get("model"):
            case.body["model"] = "tiny"  # any other id is 404
        response = case.call_and_validate(checks=checks, headers={"host": "localhost", "authorization": "Bearer admin"})
        # A value that is wrong for one kind of message may be right for another.
        if "application/json" in content and response.status_code == 200:
            validator_of(content["application/json"]["schema"]).validate(case.body)

    try:
        answered()
    except Unsatisfiable:
        assert not content  # no value of it can be wrong
