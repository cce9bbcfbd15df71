"""The state that all requests share: engine, limits, metrics, log, and shutdown."""

import asyncio
import logging
import os
import time
from pathlib import Path

from conf.errors import UserError, list_known_names
from conf.schema import ModelConfig
from conf.serving import ServeConfig
from pipelines.replicas.engine_process.client import RemoteEngine
from pipelines.replicas.served_adapters import ServedAdapters
from pipelines.server.admission import Admission
from pipelines.server.api.errors import ApiError, bad_request
from pipelines.server.api.generation import Named, RequestContext
from pipelines.server.api.requests import Body
from pipelines.server.api.skipping import not_used, warning_of
from pipelines.server.engine_session import EngineSession, loaded
from pipelines.server.metrics import Metrics
from pipelines.server.records import Record, RecordLog, RequestLog
from pipelines.server.responses.store import ResponseStore

log = logging.getLogger(__name__)

PROBES = ("/health", "/ready", "/metrics")  # polled every few seconds, and not logged
NAMED = {"user", "metadata", "client_metadata", "safety_identifier", "prompt_cache_key"}
"""Body fields that do not affect the answer. They are copied to the log."""
SETTINGS = {
    *("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed", "stream"),
}
"""Body fields that traces and the log show: the names of gen_ai.request."""
MAX_WARNINGS = 1000  # different warnings in the log


class Service:
    """The server without its routes."""

    def __init__(
        self,
        model: ModelConfig,
        config: ServeConfig,
        engine: RemoteEngine,
        request_log: RequestLog | None = None,
        traces: RecordLog | None = None,
    ) -> None:
        """Raises UserError if an adapter or a soft prefix has the model's own name, and for a store's unusable file."""
        self.config = config
        self.engine = engine
        self.model_name = config.model_name or Path(os.path.abspath(model.path)).name
        for key, paths in (("adapters", model.adapters), ("prefixes", model.prefixes)):
            if self.model_name in (paths or {}):
                problem = f"model.{key}={self.model_name} is not allowed"
                raise UserError(f"{problem}: it is the model's own name, give serve.model_name=NAME")
        self._prefixes = sorted(model.prefixes or {})
        self.adapters = ServedAdapters(
            engine,
            model.adapters or {},
            config.adapter_folders,
            max_pinned=model.max_adapters - 1,
            other_names=[self.model_name, *self._prefixes],
        )
        self.created = int(time.time())
        self.metrics = Metrics(engine, self.model_name)
        self.admission = Admission(engine, config, self.metrics.rejected)
        self.response_store = ResponseStore(config) if config.response_store is not None else None
        self.is_draining = False
        self.stopping = asyncio.Event()
        """Set when the remaining requests must end."""
        self.idle = asyncio.Event()
        """Set while no request is in progress."""
        self.idle.set()
        self._num_active = 0
        self._log = request_log
        self._traces = traces
        self._logged_warnings: set[str] = set()

    def began(self) -> None:
        self._num_active += 1
        self.idle.clear()

    def done(self, record: Record, is_logged: bool) -> None:
        """Count and log a completed request.

        `is_logged`: False for unauthenticated requests, whose number is unbounded.
        """
        record.total_s = time.time() - record.began
        self._log_warnings(record)
        if is_logged and record.path not in PROBES:
            for log_of_records in filter(None, (self._log, self._traces)):
                log_of_records.write(record)
        self._num_active -= 1
        if self._num_active == 0:
            self.idle.set()

    def _log_warnings(self, record: Record) -> None:
        """Log each warning once, because an agent repeats it in every request."""
        for warning in record.warnings:
            if warning not in self._logged_warnings and len(self._logged_warnings) < MAX_WARNINGS:
                self._logged_warnings.add(warning)
                log.warning("request %s to %s: %s", record.id, record.path, warning)

    @property
    def model_names(self) -> list[str]:
        """The names that requests may give as `model`. The model's own name is first."""
        return [self.model_name, *(adapter.name for adapter in self.adapters.present), *self._prefixes]

    def named(self, model: str) -> Named:
        """Return the adapter or soft prefix that `model` names; neither for the model itself. Raises ApiError (404)."""
        if (adapter := self.adapters.find(model)) is not None:
            return Named(adapter=adapter.engine_name)
        if model == self.model_name or model in self._prefixes:
            return Named(prefix=None if model == self.model_name else model)
        names = list_known_names(self.model_names, model)
        raise ApiError(404, f"the model {model[:200]} does not exist: {names}", param="model", code="model_not_found")

    def session(self, record: Record, body: Body, prefix: str, last_event_id: str | None) -> EngineSession:
        """Return the engine session of a request, which the caller must end. Raises ApiError (404, 503).

        `prefix`: prefix of the answer's id.
        """
        if body.model is None and body.names_model and len(self.model_names) > 1:
            raise bad_request(f"model is missing: give one of {', '.join(self.model_names)}", "model")
        record.model = body.model or self.model_name
        honoured = {"store"} if self.response_store else set()
        record.warnings = warning_of(name for name in not_used(body) if name not in honoured)
        record.client = body.model_dump(include=NAMED, exclude_none=True) or None
        record.settings = body.model_dump(include=SETTINGS, exclude_none=True) or None
        record.answer_id = prefix + record.id
        if self.config.trace_texts:
            record.collect_texts()
        adapter_or_prefix, adapter = self.named(record.model), self.adapters.find(record.model)
        loaded(self.engine)
        context = RequestContext(record.answer_id, record.model, record.key, last_event_id)
        return EngineSession(
            self.engine,
            self.admission,
            self.metrics,
            record,
            context,
            adapter_or_prefix,
            self.response_store,
            adapter,
        )


def open_traces(config: ServeConfig) -> RecordLog | None:
    """Return the traces of `serve.traces`. Raises UserError without the extra `otel`."""
    if config.traces is None:
        return None
    try:
        from pipelines.server.traces import Traces
    except ImportError as error:
        raise UserError(f"serve.traces={config.traces} needs OpenTelemetry: pip install 'quintet[otel]'") from error
    return Traces(config.traces)
