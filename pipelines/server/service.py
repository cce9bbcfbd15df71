"""The state that all requests share: engine, limits, metrics, log, and shutdown."""

import asyncio
import logging
import math
import os
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conf.errors import UserError, list_known_names
from conf.schema import ModelConfig
from conf.serving import ServeConfig
from pipelines.replicas.engine_process.client import RemoteEngine
from pipelines.replicas.served_adapters import ServedAdapters
from pipelines.server.admission import Admission
from pipelines.server.api.answers import Event
from pipelines.server.api.errors import ApiError, bad_request, failed
from pipelines.server.api.generation import Named, RequestContext
from pipelines.server.api.requests import Body
from pipelines.server.api.skipping import header_of, not_used, warning_of
from pipelines.server.engine_session import EngineSession, loaded
from pipelines.server.metrics import Metrics
from pipelines.server.records import Record, RequestLog
from pipelines.server.stream import HEADERS, ClientGone, Ends, ReaderStopped, Sender, abort, refuses, written

log = logging.getLogger(__name__)

PROBES = ("/health", "/ready", "/metrics")  # polled every few seconds, and not logged
NAMED = {"user", "metadata", "client_metadata", "safety_identifier", "prompt_cache_key"}
"""Body fields that do not affect the answer. They are copied to the log."""
MAX_WARNINGS = 1000  # different warnings in the log


class Stream(NamedTuple):
    """A response of server-sent events."""

    events: AsyncGenerator[bytes]
    failed: Callable[[ApiError], Event]
    """Returns the last event of a stream that fails."""


Result: TypeAlias = dict[str, Any] | Stream


class Service:
    """The server without its routes."""

    def __init__(
        self, model: ModelConfig, config: ServeConfig, engine: RemoteEngine, request_log: RequestLog | None = None
    ) -> None:
        """Raises UserError if an adapter or a soft prefix has the model's own name."""
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
        self.is_draining = False
        self.stopping = asyncio.Event()
        """Set when the remaining requests must end."""
        self.idle = asyncio.Event()
        """Set while no request is in progress."""
        self.idle.set()
        self._num_active = 0
        self._log = request_log
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
        if self._log is not None and is_logged and record.path not in PROBES:
            self._log.write(record)
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
        record.warnings = warning_of(not_used(body))
        record.client = body.model_dump(include=NAMED, exclude_none=True) or None
        adapter_or_prefix, adapter = self.named(record.model), self.adapters.find(record.model)
        loaded(self.engine)
        context = RequestContext(prefix + record.id, record.model, record.key, last_event_id)
        return EngineSession(self.engine, self.admission, self.metrics, record, context, adapter_or_prefix, adapter)


class EngineResponse(Response):
    """Runs `work` and sends its result, as one body or as events. Cancels it on disconnect, timeout or shutdown.

    An error before the response begins sets the status. A later error becomes the last event.
    """

    def __init__(
        self,
        service: Service,
        session: EngineSession,
        num_sequences: int,
        timeout_s: float,
        work: Callable[[EngineSession], Coroutine[Any, Any, Result]],
    ) -> None:
        super().__init__()
        self._service = service
        self._session = session
        self._num_sequences = num_sequences
        self._timeout_s = timeout_s
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError and ClientGone before the response begins."""
        service, session, seconds, reason = self._service, self._session, self._timeout_s, None
        ends = Ends(receive, seconds, service.stopping)
        sender = Sender(send, service.config.send_timeout_s, scope.get("state", {}).get("write_now", refuses))
        try:
            with service.admission.place(self._num_sequences, seconds):
                result = await ends.run(self._work(session))
                if isinstance(result, Stream):
                    reason = await self._send_events(result, ends, sender)
            if not isinstance(result, Stream):
                head = [(b"content-type", b"application/json"), *header_of(session.record.warnings)]
                await sender.send_head(head)
                await sender.send(msgspec.json.encode(result), more_body=False)
        except ClientGone:
            reason = "disconnected"
            raise
        except ReaderStopped:
            reason = "not_read"
            abort(scope)
        except ApiError as error:
            reason = (error.code or error.type) if error.status in (503, 504) else None
            raise
        finally:
            session.end(reason)

    async def _send_events(self, stream: Stream, ends: Ends, sender: Sender) -> str | None:
        """Send the events, or the error that ends them. Return the reason of an early end. Raises ReaderStopped."""

        async def forward() -> None:
            with sender.kept_alive():
                async with aclosing(stream.events) as parts:
                    async for part in parts:
                        await sender.send(part)

        reason = None
        try:
            await sender.send_head([*HEADERS, *header_of(self._session.record.warnings)])
            await ends.run(forward())
        except ClientGone:
            return "disconnected"
        except ApiError as error:
            reason = error.code or error.type
            await sender.send(written([stream.failed(error)]))
        except ReaderStopped:
            raise
        except Exception:
            reason = "failed"
            log.error("a stream failed:\n%s", traceback.format_exc())
            await sender.send(written([stream.failed(failed())]))
        await sender.send(b"", more_body=False)
        return reason


def timeout_s(headers: Headers, most: float, is_stream: bool) -> float:
    """Return the time limit of a request in seconds.

    SDKs send a read timeout, the longest wait for the next bytes. Without streaming this is the total time.
    """
    limits = []
    if (header := headers.get("x-request-timeout")) is not None:
        if (seconds := _seconds(header)) is None:
            message = f"the header x-request-timeout={header[:50]} is not allowed: give seconds, a number above 0"
            raise ApiError(400, message, param="x-request-timeout")
        limits.append(seconds)
    if not is_stream and (seconds := _seconds(headers.get("x-stainless-read-timeout", ""))) is not None:
        limits.append(seconds)
    return min(most, *limits) if limits else most


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
