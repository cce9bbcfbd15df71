"""Prometheus metrics with vLLM's names, so that vLLM's dashboards work, and further metrics named `quintet:`.

Names: docs.vllm.ai, "Production Metrics".
"""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pipelines.replicas.engine_process.client import RemoteEngine
from pipelines.replicas.engine_process.frames import STEP_TOKENS, Beat, Done

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHORT_MS = (1, 2.5, 5, 10, 25, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2500, 5000, 10_000, 40_000, 80_000)
SHORT = tuple(ms / 1000 for ms in SHORT_MS)  # seconds, as LONG
LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """Measurements since the server started."""

    def __init__(self, engine: RemoteEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self._registry.register(_Beats(engine, model_name))
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From a request's submission to its last token.", LONG
        )
        self._first = self._histogram(
            "time_to_first_token_seconds", "From a request's submission to its first token.", SHORT
        )
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of a stream.", SHORT)
        self._queue = self._histogram("request_queue_time_seconds", "Wait before a request's first step.", LONG)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From a request's first step to its first token.", LONG
        )
        self._decode = self._histogram("request_decode_time_seconds", "From a request's first token to its last.", LONG)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a request's prompt.", TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Tokens that a request generated.", TOKENS)
        self._most = self._histogram("request_max_num_generation_tokens", "Most tokens of a request's samples.", TOKENS)
        self._num_prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._num_generated = self._counter("generation_tokens", "Generated tokens.")
        self._queries = self._counter(
            "prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache."
        )
        self._hits = self._counter("prefix_cache_hits", "Tokens of prompts that were found there.")
        self._success = self._counter("request_success", "Samples that ended.", "finished_reason")
        self._rejections = self._counter(
            "admission_rejections", "Requests that were refused because too much waits.", "reason"
        )
        self._cancelled = self._counter("cancelled", "Requests that ended early.", "why", prefix="quintet")
        self._of_keys = self._counter("tokens", "Tokens of prompts and answers.", "key", prefix="quintet")

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def rejected(self, reason: str) -> None:
        self._rejections.labels(self._model, reason).inc()

    def between_tokens(self, seconds: float) -> None:
        self._between.observe(seconds)

    def done(self, done: Done, finish: list[str], num_tokens: list[int], key: str | None) -> None:
        """Count a prompt that the engine has completed. `finish` and `num_tokens` have one element per sample."""
        for reason in finish:
            self._success.labels(self._model, reason).inc()
        self._num_prompt.inc(done.num_prompt_tokens)
        self._num_generated.inc(done.num_generated_tokens)
        self._queries.inc(done.num_prompt_tokens)
        self._hits.inc(done.num_cached_tokens)
        self._of_keys.labels(self._model, key or "").inc(done.num_prompt_tokens + done.num_generated_tokens)
        self._prompt.observe(done.num_prompt_tokens)
        self._generated.observe(done.num_generated_tokens)
        self._most.observe(max(num_tokens, default=0))
        self._e2e.observe(done.total_s)
        self._queue.observe(done.queue_s)
        if done.first_token_s is not None:
            self._first.observe(done.first_token_s)
            self._prefill.observe(max(done.first_token_s - done.queue_s, 0.0))
            self._decode.observe(max(done.total_s - done.first_token_s, 0.0))

    def ended_early(self, reason: str) -> None:
        self._cancelled.labels(self._model, reason).inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)

    def _counter(self, name: str, text: str, *labels: str, prefix: str = "vllm") -> Counter:
        """Return a counter. With additional `labels` it has one child per label value."""
        counter = Counter(f"{prefix}:{name}", text, ["model_name", *labels], registry=self._registry)
        return counter if labels else counter.labels(self._model)


class _Beats(Collector):
    """Exposes the content of the engine's last Beat frame."""

    def __init__(self, engine: RemoteEngine, model_name: str) -> None:
        self._engine = engine
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield the current state. All values are 0 before the first Beat frame."""
        beat = self._engine.beat or Beat(0, 0, 0.0, 0, 0, 0, 0.0)
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that run.", beat.num_running),
            ("vllm:num_requests_waiting", "Requests that wait.", beat.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1.", beat.cache_usage),
            ("quintet:step_seconds", "Seconds of the last step.", beat.step_s),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in (
            ("vllm:num_preemptions", "Requests that gave up their blocks for others.", beat.num_preemptions),
            ("quintet:engine_restarts", "Times that the engine was started again.", self._engine.num_restarts),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield self._steps(beat)

    def _steps(self, beat: Beat) -> Metric:
        limits = [*map(str, map(float, STEP_TOKENS)), "+Inf"]
        counts = accumulate(beat.num_steps or [0] * len(limits))
        steps = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens that a step computed.", labels=["model_name"]
        )
        steps.add_metric([self._model], list(zip(limits, counts, strict=True)), beat.num_step_tokens)
        return steps
