"""The response of a request to the engine: one body or a stream of events, with the ends of both."""

import logging
import math
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple, TypeAlias

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipelines.server.api.answers import Event
from pipelines.server.api.errors import ApiError, failed
from pipelines.server.api.skipping import header_of
from pipelines.server.engine_session import EngineSession
from pipelines.server.service import Service
from pipelines.server.stream import HEADERS, ClientGone, Ends, ReaderStopped, Sender, abort, refuses, written

log = logging.getLogger(__name__)


class Stream(NamedTuple):
    """A response of server-sent events."""

    events: AsyncGenerator[bytes]
    failed: Callable[[ApiError], Event]
    """Returns the last event of a stream that fails."""


Result: TypeAlias = dict[str, Any] | Stream


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
