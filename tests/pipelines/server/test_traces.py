"""Traces arrive at a collector of OpenTelemetry's protocol, and the dashboard's queries name metrics that exist."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipelines.server.service import Service
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import ask, service_of

pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="the extra otel")
DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana.json"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"messages": [{"role": "user", "content": "hello secret"}], "model": "tiny", "max_tokens": 3, "temperature": 0.5}


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


def test_spans_of_requests() -> None:
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
