"""Answers on their way to a client that may leave, be slow, or have no more time: whole ones, and server-sent events."""

import asyncio
import json
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipelines.api.errors import ApiError

log = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_ALIVE_S = 15.0  # of silence, after which proxies must see something
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has left: nobody waits for the answer."""


def event(data: bytes, name: str | None = None, id: str | None = None) -> bytes:
    """Return a server-sent event. `data` is of one line, as JSON is."""
    head = f"event: {name}\n" if name else ""
    head += f"id: {id}\n" if id else ""
    return head.encode() + b"data: " + data + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the last event of a stream that failed."""
    return event(json.dumps(error.body()).encode())


class Ends:
    """Reasons to end a request early: the client leaves, the time is over, or the server ends."""

    def __init__(self, receive: Receive, timeout_s: float, stopping: asyncio.Event) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._stopping = stopping

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, and cancel it where the request ends before. Raises ClientGone, and ApiError (503, 504)."""
        task = asyncio.ensure_future(work)
        gone, stop = asyncio.ensure_future(self._gone()), asyncio.ensure_future(self._stopping.wait())
        left = self._deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait({task, gone, stop}, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ClientGone
            raise self._draining() if stop.done() else self._late()
        finally:
            for each in (task, gone, stop):
                each.cancel()
            await asyncio.gather(task, gone, stop, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _draining(self) -> ApiError:
        return ApiError(503, "the server is ending: ask another one", "server_error", code="draining")

    def _late(self) -> ApiError:
        message = f"the request took longer than the {self._timeout_s:g} s that it had"
        return ApiError(504, message, "timeout_error", code="deadline", headers={"x-should-retry": "false"})


class ReaderStopped(Exception):
    """The client reads nothing."""


class EventStream(Response):
    """An answer of events. What is refused before it begins has a status of its own; what fails later is the last event."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        ends: Ends,
        send_timeout_s: float,
        closed: Callable[[str | None], None],
        error_event: Callable[[ApiError], bytes] = error_event,
    ) -> None:
        """`closed` is called at the end, with why it came early."""
        super().__init__()
        self._events = events
        self._ends = ends
        self._send_timeout_s = send_timeout_s
        self._closed = closed
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Sender(send, self._send_timeout_s)
        try:
            await self._send_events(sender)
            await sender.send(b"", more_body=False)
        except ReaderStopped:
            scope.get("state", {}).get("abort", _nothing)()

    async def _send_events(self, sender: "_Sender") -> None:
        """Send the events, or the error that ends them. Raises ReaderStopped."""
        why = None
        try:
            await sender.send_message({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._ends.run(self._forward(sender))
        except ClientGone:
            why = "disconnected"
        except ReaderStopped:
            why = "not_read"
            raise
        except ApiError as error:
            why = error.code or error.type
            await sender.send(self._error_event(error))
        except Exception:
            why = "failed"
            log.error("a stream failed:\n%s", traceback.format_exc())
            await sender.send(self._error_event(ApiError(500, "the server failed: its log says why", "server_error")))
        finally:
            self._closed(why)

    async def _forward(self, sender: "_Sender") -> None:
        with sender.kept_alive():
            async for each in self._events:
                await sender.send(each)


def _nothing() -> None:
    """Abort no connection, where there is none."""


class _Sender:
    """Sends the parts of a body, and a comment where there has been nothing to send for long."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._sent_at = asyncio.get_running_loop().time()
        self._is_sending = False

    async def send(self, body: bytes, more_body: bool = True) -> None:
        """Send a part of the body. Raises ReaderStopped as `send_message`."""
        await self.send_message({"type": "http.response.body", "body": body, "more_body": more_body})

    async def send_message(self, message: dict[str, Any]) -> None:
        """Raises ReaderStopped where the client does not read for too long."""
        self._is_sending = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError as error:
            raise ReaderStopped(f"the client read nothing for {self._timeout_s:g} s") from error
        finally:
            self._is_sending = False
        self._sent_at = asyncio.get_running_loop().time()

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Send comments in the pauses within the block."""
        task = asyncio.ensure_future(self._keep_alive())
        try:
            yield
        finally:
            task.cancel()

    async def _keep_alive(self) -> None:
        while True:
            silent = asyncio.get_running_loop().time() - self._sent_at
            if silent >= KEEP_ALIVE_S and not self._is_sending:
                with suppress(ReaderStopped):
                    await self.send(b": keep-alive\n\n")
                silent = 0.0
            await asyncio.sleep(max(KEEP_ALIVE_S - silent, 1.0))
