"""Traces arrive at a collector of OpenTelemetry's protocol, with texts only if asked for; the dashboard's queries name
metrics that exist."""

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipelines.server.api.traced_texts import MAX_CHARS, TracedTexts
from pipelines.server.app import create_app
from pipelines.server.records import RequestLog
from pipelines.server.service import Service
from tests.helpers.chat_styles import CALLS, WEATHER, chat_of
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import ask, asking, service_of
from tests.helpers.serving import run_async

pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="the extra otel")
DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana.json"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"messages": [{"role": "user", "content": "hello secret"}], "model": "tiny", "max_tokens": 3, "temperature": 0.5}

ANSWER = ["<think>", "想", "</think>", "好 ", *CALLS["chatml"].splitlines(keepends=True)]
"""The scripted answer, by token."""
TOOLS = [{"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("weather", "clock")]
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "北京"}'}}
TURNS = [
    {"role": "user", "content": "今天天气 secret"},
    {"role": "assistant", "content": "看", "tool_calls": [CALL]},
    {"role": "tool", "content": "晴 secret", "tool_call_id": "call-1"},
]
CONVERSATION = [
    {"role": "user", "parts": [{"type": "text", "content": "今天天气 secret"}]},
    {"role": "assistant", "parts": [
        {"type": "text", "content": "看"},
        {"type": "tool_call", "id": "call-1", "name": "weather", "arguments": {"city": "北京"}},
    ]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call-1", "response": "晴 secret"}]},
]  # fmt: skip
ITEMS = [
    {"role": "user", "content": "今天天气 secret"},
    {"role": "assistant", "content": "看"},
    {"type": "function_call", "call_id": "call-1", **CALL["function"]},
    {"type": "function_call_output", "call_id": "call-1", "output": "晴 secret"},
]
BLOCKS = [
    {"role": "user", "content": "今天天气 secret"},
    {"role": "assistant", "content": [
        {"type": "text", "text": "看"},
        {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "北京"}},
    ]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call-1", "content": "晴 secret"}]},
]  # fmt: skip
SYSTEM = {"role": "system", "content": "只说中文"}
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
HOSTED = [{"name": name, "input_schema": WEATHER} for name in ("weather", "clock")]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [SYSTEM, *TURNS], "tools": TOOLS, "max_tokens": len(ANSWER)},
    "/v1/responses": {
        "input": ITEMS, "instructions": "只说中文", "tools": FLAT_TOOLS, "max_output_tokens": len(ANSWER),
    },
    "/v1/messages": {"messages": BLOCKS, "system": "只说中文", "tools": HOSTED, "max_tokens": len(ANSWER)},
    "/v1/completions": {"prompt": ["今天 secret", "b"], "max_tokens": len(ANSWER)},
}  # fmt: skip


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of a collector, and the list of the spans that it receives."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def traced(service: Service, endpoint: str) -> Any:
    from pipelines.server.traces import Traces

    service._traces = traces = Traces(endpoint)
    return traces


def attributes(span: Any) -> dict[str, Any]:
    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        return [value(item) for item in of.array_value.values] if kind == "array_value" else getattr(of, kind)

    return {attribute.key: value(attribute.value) for attribute in span.attributes}


def traced_texts(folder: Path, bodies: list[tuple[str, dict[str, Any]]], **config: Any) -> list[dict[str, Any]]:
    """Send the requests to a server whose engine gives ANSWER. Return the attributes of their spans with JSON read, and
    the answers. Check that the log has no text."""
    chat, _ = chat_of(folder, "chatml")

    answers: list[dict[str, Any]] = []

    async def answered(service: Service) -> None:
        async with asking(create_app(service, chat, {})) as client:
            for path, body in bodies:
                answer = await client.post(path, json=body)
                assert answer.status_code == (400 if "too long" in str(body) else 200)
                answers.append({} if body.get("stream") else {"answer": answer.json()})

    pieces = itertools.cycle(ANSWER)
    with collector() as (endpoint, spans), closing(RequestLog(folder / "requests.jsonl")) as log:
        engine = FakeEngine(lambda token: next(pieces), context_length=4096, num_cache_tokens=8192)
        service = service_of(engine, traces=endpoint, **config)
        service._log, traces = log, traced(service, endpoint)
        run_async(answered(service))
        traces.close()
    chat.close()
    assert "secret" not in (folder / "requests.jsonl").read_text()
    roots = [attributes(span) for span in spans if span.name.startswith("POST")]
    assert all(len(value) <= MAX_CHARS for facts in roots for value in facts.values() if isinstance(value, str))
    names = ("gen_ai.system_instructions", "gen_ai.input.messages", "gen_ai.output.messages")
    texts = [{name.split(".")[1]: json.loads(facts[name]) for name in names if name in facts} for facts in roots]
    return [text | answer for text, answer in zip(texts, answers, strict=True)] if any(texts) else texts


def check_texts(folder: Path) -> None:
    """Check the texts of all routes against the schemas of the conventions, written out here."""
    requests = [(path, {**body, "stream": stream}) for path, body in BODIES.items() for stream in (False, True)]
    assert traced_texts(folder, requests) == [{}] * len(requests)
    texts = traced_texts(folder, requests, trace_texts=True)
    for whole, streamed in zip(texts[::2], texts[1::2], strict=True):
        assert whole == streamed | {"answer": whole["answer"]}
    chat, response, message, completion = texts[::2]
    instructions = [{"type": "text", "content": "只说中文"}]
    assert chat["input"] == [{"role": "system", "parts": instructions}, *CONVERSATION]
    for separate in (response, message):
        assert separate["system_instructions"] == instructions
        assert (separate["input"], separate["output"]) == (CONVERSATION, chat["output"])
    first, second = (call["id"] for call in chat["answer"]["choices"][0]["message"]["tool_calls"])
    parts = [
        {"type": "reasoning", "content": "想"},
        {"type": "text", "content": "好"},  # without the space before a call, as clients get it
        {"type": "tool_call", "id": first, "name": "weather", "arguments": {"city": "北京"}},
        {"type": "tool_call", "id": second, "name": "clock", "arguments": {}},
    ]
    assert chat["output"] == [{"role": "assistant", "parts": parts, "finish_reason": "length"}]
    user = [{"role": "user", "parts": [{"type": "text", "content": text}]} for text in ("今天 secret", "b")]
    assert completion["input"] == user
    outputs = [answer["parts"][0]["content"] for answer in completion["output"]]
    assert outputs == [choice["text"] for choice in completion["answer"]["choices"]]
    long = [{"role": "user", "content": "early"}, {"role": "user", "content": '字"' * MAX_CHARS + "too long"}]
    (refused,) = traced_texts(folder, [("/v1/chat/completions", {"messages": long})], trace_texts=True)
    ((only,),) = (message["parts"] for message in refused["input"])
    assert long[1]["content"].startswith(only["content"])
    assert len(only["content"]) > MAX_CHARS * 2 / 3 - 99  # a quotation mark is two characters of JSON


def check_odd_answers() -> None:
    """Answers that are cut, and arguments that are not JSON."""
    texts = TracedTexts()
    assert dict(texts.attributes()) == {}
    deltas = [{"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]}]
    for index, arguments in enumerate(('{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud83d"}', '{"a', "[" * 9999, "2")):
        texts.add(index, deltas)
        texts.add(index, [{"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}])
        texts.end(index, "tool_calls")
        answer = json.loads(dict(texts.attributes())["gen_ai.output.messages"])[index]
        value = 2 if arguments == "2" else arguments
        assert answer["parts"] == [{"type": "tool_call", "id": "a", "name": "f", "arguments": value}]
        assert answer["finish_reason"] == "tool_call"
    texts = TracedTexts()
    texts.add(0, [{"content": "a"}, {"content": "\ud83d"}])
    parts = [{"type": "text", "content": "a?"}]
    expected = [{"role": "assistant", "parts": parts, "finish_reason": "error"}]
    assert json.loads(dict(texts.attributes())["gen_ai.output.messages"]) == expected
    for excess in range(-3, 4):  # around the limit
        texts = TracedTexts()
        texts.ask(
            [{"role": "user", "content": "old"}, {"role": "user", "content": "\n" * (MAX_CHARS // 2 - 30 + excess)}]
        )
        (value,) = dict(texts.attributes()).values()
        assert MAX_CHARS - 50 < len(value) <= MAX_CHARS
        assert json.loads(value)[-1]["parts"][0]["content"].startswith("\n" * 9)


def test_spans_of_requests(tmp_path: Path) -> None:
    check_texts(tmp_path)
    check_odd_answers()
    with collector() as (endpoint, spans):
        service = service_of(FakeEngine())
        traces = traced(service, endpoint)
        before = time.time_ns()
        headers = {"traceparent": PARENT, "x-request-id": "abc"}
        assert ask("POST", "/v1/chat/completions", service, json=CHAT, headers=headers).status_code == 200
        assert ask("POST", "/v1/chat/completions", service, json={**CHAT, "model": "other"}).status_code == 404
        assert ask("GET", "/metrics", service).status_code == 200  # a probe
        after = time.time_ns()
        traces.close()
    by_name = {span.name: span for span in spans if span.trace_id.hex() == PARENT.split("-")[1]}
    assert by_name.keys() == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
    root = by_name.pop("POST /v1/chat/completions")
    assert (root.parent_span_id.hex(), root.kind) == (PARENT.split("-")[2], root.SPAN_KIND_SERVER)
    facts = attributes(root)
    expected = {
        "http.request.method": "POST", "url.path": "/v1/chat/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "quintet", "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 3, "gen_ai.request.temperature": 0.5, "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "chatcmpl-abc", "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": 3,
    }  # fmt: skip
    assert expected.items() <= facts.items()
    assert facts["gen_ai.usage.input_tokens"] > 0
    assert "secret" not in str(spans)
    for child in by_name.values():
        assert child.parent_span_id == root.span_id
    queue, prefill, decode = (by_name[name] for name in ("queue", "prefill", "decode"))
    assert before <= root.start_time_unix_nano <= queue.start_time_unix_nano <= queue.end_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano <= prefill.end_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano <= decode.end_time_unix_nano
    assert root.end_time_unix_nano <= after
    (refused,) = (span for span in spans if span.trace_id != root.trace_id)
    assert attributes(refused)["http.response.status_code"] == 404
    assert not refused.status.code  # the client's error
    # a request does not wait for an absent collector, and the end has a time limit
    service = service_of(FakeEngine())
    traces = traced(service, "http://127.0.0.1:9/v1/traces")  # the port of discard, which does not listen
    assert ask("POST", "/v1/chat/completions", service, json=CHAT).status_code == 200
    traces.close()
    with collector() as (endpoint, spans):
        service = service_of(engine := FakeEngine())
        traces, engine.info = traced(service, endpoint), None
        assert ask("POST", "/v1/chat/completions", service, json=CHAT).status_code == 503
        traces.close()
    assert [(span.status.code, attributes(span)["error.type"]) for span in spans] == [(2, "503")]


def test_the_dashboards_queries_name_metrics() -> None:
    text = ask("GET", "/metrics", service_of(FakeEngine())).text
    names = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    labels: dict[str, set[str]] = {}
    for name, listed in re.findall(r"^([\w:]+)\{([^}]*)\}", text, re.M):
        labels.setdefault(name, set()).update(re.findall(r"(\w+)=", listed))
    queries = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for query in queries:
        metrics = re.findall(r"((?:vllm|quintet):\w+)\{", query)
        assert metrics, query
        for metric in metrics:
            base = re.sub(r"_(bucket|total)$", "", metric)
            assert {metric, base, f"{base}_total"} & names, metric
            used = set(re.findall(r"by \(([^)]*)\)", query)) | {"model_name"}
            if known := labels.get(metric):  # a counter with labels has no line before its first event
                assert used <= known, query
