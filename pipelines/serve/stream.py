"""Answers on their way to a client that may leave, be slow, or have no more time: whole ones, and server-sent events."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from pipelines.api.answers import Event
from pipelines.api.errors import ApiError, draining

T = TypeVar("T")

KEEP_ALIVE_S = 15.0  # of silence, after which proxies must see something
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client has left: nobody waits for the answer."""


def written(events: list[Event]) -> bytes:
    """Return server-sent events as they are sent."""
    return b"".join(map(_written, events))


def _written(event: Event) -> bytes:
    head = f"event: {event.name}\n" if event.name else ""
    head += f"id: {event.id}\n" if event.id else ""
    data = event.data.encode() if isinstance(event.data, str) else msgspec.json.encode(event.data)
    return head.encode() + b"data: " + data + b"\n\n"


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
            raise draining() if stop.done() else self._late()
        finally:
            for each in (task, gone, stop):
                each.cancel()
            await asyncio.gather(task, gone, stop, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _late(self) -> ApiError:
        message = f"the request took longer than the {self._timeout_s:g} s that it had"
        return ApiError(504, message, "timeout_error", code="deadline", headers={"x-should-retry": "false"})


class ReaderStopped(Exception):
    """The client reads nothing."""


def abort(scope: Scope) -> None:
    """End the connection of a request, if it has one of its own, and send nothing more of what waits there."""
    if end := scope.get("state", {}).get("abort"):
        end()


class Sender:
    """Sends the parts of a body, and a comment where there has been nothing to send for long."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._sent_at = asyncio.get_running_loop().time()
        self._is_sending = False

    async def send(self, body: bytes, more_body: bool = True) -> None:
        """Send a part of the body. Raises ReaderStopped where the client does not read for too long."""
        await self.send_message({"type": "http.response.body", "body": body, "more_body": more_body})

    async def send_head(self, headers: list[tuple[bytes, bytes]], status: int = 200) -> None:
        """Send what comes before the body. Raises ReaderStopped as `send`."""
        await self.send_message({"type": "http.response.start", "status": status, "headers": headers})

    async def send_message(self, message: Message) -> None:
        """Send a message of ASGI. Raises ReaderStopped as `send`."""
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
