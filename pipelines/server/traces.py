"""OpenTelemetry traces: the spans of a completed request, with the attributes of the semantic conventions of HTTP and
generative AI. No span contains a prompt or generated text without serve.trace_texts.

The SDK of the extra `otel` reads the standard variables OTEL_*, for example for a sampler, headers and resources.
"""

from collections.abc import Iterator
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipelines.server.records import Record

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""gen_ai.operation.name by path."""
COMPLETE = ("stop", "length", "no_token")
"""Finish reasons of complete answers."""
EXPORT_S = 2.0
"""Time limit of an export, so that an unreachable collector does not delay the end of the server."""


class Traces:
    """Sends the spans of requests in a thread of its own. If its queue is full, spans are dropped."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: address of an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces."""
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "quintet"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_S)))
        self._tracer = self._provider.get_tracer("quintet")
        self._propagator = TraceContextTextMapPropagator()

    def write(self, record: Record) -> None:
        """Add the spans of a completed request: the HTTP request, and its queue, prefill and decode phases."""
        end_s = record.began + (record.total_s or 0.0)
        span = self._tracer.start_span(
            f"{record.method} {record.path}",
            self._propagator.extract(record.trace_context),
            SpanKind.SERVER,
            dict(_attributes(record)),
            start_time=_ns(record.began),
        )
        for name, start, end in _phases(record):
            self._tracer.start_span(name, set_span_in_context(span), start_time=_ns(start)).end(_ns(end))
        _set_status(span, record)
        span.end(_ns(end_s))

    def close(self) -> None:
        """Send the remaining spans, for at most about EXPORT_S."""
        self._provider.shutdown()


def _attributes(record: Record) -> Iterator[tuple[str, Any]]:
    yield "http.request.method", record.method
    yield "url.path", record.path
    if record.status is not None:
        yield "http.response.status_code", record.status
    if record.model is None:  # a request without a model, such as GET /v1/models
        return
    if operation := OPERATIONS.get(record.path):
        yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "quintet"
    yield "gen_ai.request.model", record.model
    for name, value in (record.settings or {}).items():
        yield f"gen_ai.request.{name}", value
    if record.texts is not None:
        yield from record.texts.attributes()
    if record.queue_s is None:  # refused before the engine computed anything
        return
    yield "gen_ai.response.model", record.model
    yield "gen_ai.response.id", record.answer_id or record.id
    yield "gen_ai.response.finish_reasons", record.finish
    yield "gen_ai.usage.input_tokens", record.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", record.num_generated_tokens
    yield "gen_ai.usage.cache_read.input_tokens", record.num_cached_tokens
    yield "gen_ai.latency.time_in_queue", record.queue_s
    if record.first_token_s is not None:
        yield "gen_ai.latency.time_to_first_token", record.first_token_s


def _phases(record: Record) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each phase that the request's first prompt reached, in seconds since 1970."""
    if record.queue_s is None or record.submitted_s is None or record.engine_s is None:
        return
    submitted = record.began + record.submitted_s
    admitted, ended = submitted + record.queue_s, submitted + record.engine_s
    yield "queue", submitted, admitted
    first = ended if record.first_token_s is None else submitted + record.first_token_s
    yield "prefill", admitted, first
    if record.first_token_s is not None:
        yield "decode", first, ended


def _set_status(span: Span, record: Record) -> None:
    """Mark a request as failed if the server failed it, or if it ended before its answer was complete."""
    early = next((reason for reason in record.finish if reason not in COMPLETE), None)
    if record.status is not None and record.status < 500 and early is None:
        return
    reason = early or ("disconnected" if record.status is None else str(record.status))
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
