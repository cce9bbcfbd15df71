"""What all requests share: engine, limits, metrics, log, and the server's end."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from conf.errors import there_are
from conf.schema import RunConfig
from pipelines.api.errors import ApiError
from pipelines.serve.admission import Admission
from pipelines.serve.exchange import Engine, Exchange, loaded
from pipelines.serve.metrics import Metrics
from pipelines.serve.records import Record, RequestLog
from pipelines.serve.stream import ClientGone, Ends, EventStream

PROBES = ("/health", "/ready", "/metrics")  # asked every few seconds, and not logged
Result = dict[str, Any] | AsyncIterator[bytes]
"""The body of a whole answer, or the events of a streamed one."""


class Service:
    """The server without its routes."""

    def __init__(self, run: RunConfig, engine: Engine, request_log: RequestLog | None = None) -> None:
        self.config = run.serve
        self.engine = engine
        self.model_name = run.serve.model_name or Path(run.model.path).name
        self.adapters = sorted(run.model.adapters or {})
        self.created = int(time.time())
        self.metrics = Metrics(engine, self.model_name)
        self.admission = Admission(engine, run.serve, self.metrics.rejected)
        self.is_draining = False
        self.stopping = asyncio.Event()
        """Set when requests must end that have not."""
        self.idle = asyncio.Event()
        """Set while no request is answered."""
        self.idle.set()
        self._num_active = 0
        self._log = request_log

    def began(self) -> None:
        """Count a request that has come."""
        self._num_active += 1
        self.idle.clear()

    def done(self, record: Record) -> None:
        """Log a request that has been answered."""
        record.total_s = time.time() - record.began
        if self._log is not None and record.path not in PROBES:
            self._log.write(record)
        self._num_active -= 1
        if self._num_active == 0:
            self.idle.set()

    def adapter_of(self, model: str) -> str | None:
        """Return the adapter that a request's `model` names, None for the model itself. Raises ApiError (404)."""
        if model == self.model_name:
            return None
        if model in self.adapters:
            return model
        known = there_are([self.model_name, *self.adapters], model)
        raise ApiError(404, f"the model {model[:200]} does not exist: {known}", param="model", code="model_not_found")

    async def respond(
        self,
        request: Request,
        model: str,
        num_sequences: int,
        is_stream: bool,
        work: Callable[[Exchange], Awaitable[Result]],
    ) -> Response:
        """Return the answer that `work` makes, which is cancelled where client, time or server end before. Raises ApiError.

        `work` gives a body, or events once the engine has accepted the request.
        """
        record: Record = request.state.record
        record.model, adapter = model, self.adapter_of(model)
        loaded(self.engine)
        timeout_s = _timeout_s(request, self.config.request_timeout_s, is_stream)
        ends = Ends(request.receive, timeout_s, self.stopping)
        with ExitStack() as stack:
            stack.enter_context(self.admission.place(num_sequences, timeout_s))
            exchange = Exchange(self.engine, self.admission, self.metrics, record, adapter)
            early: list[str] = []
            stack.callback(lambda: exchange.end(*early))
            try:
                result = await ends.run(_awaited(work(exchange)))
            except ClientGone:
                early.append("disconnected")
                raise
            except ApiError as error:
                if error.status in (503, 504):
                    early.append(error.code or error.type)
                raise
            if isinstance(result, dict):
                return JSONResponse(result)
            kept = stack.pop_all()

        def closed(why: str | None) -> None:
            early.extend([why] if why else [])
            kept.close()

        return EventStream(result, ends, self.config.send_timeout_s, closed)


async def _awaited(work: Awaitable[Result]) -> Result:
    return await work


def _timeout_s(request: Request, most: float, is_stream: bool) -> float:
    """Return the seconds that a request has. An SDK says how long it waits for the next bytes, which for a whole answer is all its time."""
    given = []
    if (own := request.headers.get("x-request-timeout")) is not None:
        if (seconds := _seconds(own)) is None:
            message = f"the header x-request-timeout={own[:50]} is not allowed: give seconds, a number above 0"
            raise ApiError(400, message, param="x-request-timeout")
        given.append(seconds)
    if not is_stream and (seconds := _seconds(request.headers.get("x-stainless-read-timeout", ""))) is not None:
        given.append(seconds)
    return min(most, *given) if given else most


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
