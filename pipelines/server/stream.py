"""Delivery of responses, whole or as server-sent events, to clients that may disconnect, read slowly, or time out."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from pipelines.server.api.answers import Event
from pipelines.server.api.errors import ApiError, draining

T = TypeVar("T")

KEEP_ALIVE_S = 15.0  # maximum silence of a stream; proxies close silent connections
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client has disconnected."""


def written(events: list[Event]) -> bytes:
    """Return server-sent events in wire format."""
    return b"".join(map(_written, events))


def _written(event: Event) -> bytes:
    head = f"event: {event.name}\n" if event.name else ""
    head += f"id: {event.id}\n" if event.id else ""
    data = event.data.encode() if isinstance(event.data, str) else msgspec.json.encode(event.data)
    return head.encode() + b"data: " + data + b"\n\n"


class Ends:
    """Ends a request early if the client disconnects, the time limit passes, or the server shuts down."""

    def __init__(self, receive: Receive, timeout_s: float, stopping: asyncio.Event) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._stopping = stopping

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. An early end cancels it and raises ClientGone or ApiError (503, 504)."""
        task = asyncio.ensure_future(work)
        client_gone, stop = asyncio.ensure_future(self._client_gone()), asyncio.ensure_future(self._stopping.wait())
        remaining_s = self._deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait(
                {task, client_gone, stop}, timeout=max(remaining_s, 0.0), return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
            if client_gone.done():
                raise ClientGone
            raise draining() if stop.done() else self._late()
        finally:
            for future in (task, client_gone, stop):
                future.cancel()
            await asyncio.gather(task, client_gone, stop, return_exceptions=True)

    async def _client_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _late(self) -> ApiError:
        message = f"the request took longer than its time limit of {self._timeout_s:g} s"
        return ApiError(504, message, "timeout_error", code="deadline", headers={"x-should-retry": "false"})


class ReaderStopped(Exception):
    """The client does not read the response."""


def abort(scope: Scope) -> None:
    """Close the connection of a request, if the request has one, and discard unsent data."""
    if end := scope.get("state", {}).get("abort"):
        end()


def refuses(part: bytes) -> bool:
    """Write nothing: the `write_now` of a request that does not come from a connection."""
    return False


class Sender:
    """Sends the messages of a response. Sends keep-alive comments during long pauses."""

    def __init__(self, send: Send, timeout_s: float, write_now: Callable[[bytes], bool] = refuses) -> None:
        """`write_now`: writes a part of the body at once, or returns False if `send` must do so."""
        self._send = send
        self._write_now = write_now
        self._timeout_s = timeout_s
        self._sent_at = asyncio.get_running_loop().time()
        self._is_sending = False

    async def send(self, body: bytes, more_body: bool = True) -> None:
        """Send a part of the body. Raises ReaderStopped if the client does not read within the time limit."""
        if body and more_body and self._write_now(body):
            self._sent_at = asyncio.get_running_loop().time()
            return
        await self.send_message({"type": "http.response.body", "body": body, "more_body": more_body})

    async def send_head(self, headers: list[tuple[bytes, bytes]], status: int = 200) -> None:
        """Send status and headers. Raises ReaderStopped as `send` does."""
        await self.send_message({"type": "http.response.start", "status": status, "headers": headers})

    async def send_message(self, message: Message) -> None:
        """Send an ASGI message. Raises ReaderStopped as `send` does."""
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
        """Send keep-alive comments during pauses within the block."""
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
