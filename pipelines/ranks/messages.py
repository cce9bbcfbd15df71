"""Messages between rank 0 and a worker rank: a JSON object and a binary payload.

Nothing received is executed or unpickled.
"""

import json
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

LENGTHS = struct.Struct("<IQ")  # byte lengths of the JSON text and of the payload
MAX_HEADER_BYTES = 64 << 20  # a run's config may contain settings for each layer
MAX_PAYLOAD_BYTES = 1 << 34  # hidden states of a step
MAX_HELLO_BYTES = 1 << 14  # of an unverified sender; fits the CPU list of two thousand CPUs
LOOK_S = 0.2  # poll interval for the rest of a message

Header = dict[str, Any]
Message = tuple[Header, bytearray]


class Gone(Exception):
    """The other end has closed the socket, or does not speak this protocol."""


class Silent(Gone):
    """The other end has sent part of a message, and then nothing for too long."""


class Channel:
    """A stream socket that carries whole messages. Several threads may send, one may receive."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._stream.fileno()

    def send(self, header: Header, payload: bytes | memoryview = b"") -> None:
        """Send a message. Raises Gone."""
        text = json.dumps(header, separators=(",", ":")).encode()
        try:
            with self._sending:
                self._stream.sendall(LENGTHS.pack(len(text), len(payload)) + text)
                if payload:
                    self._stream.sendall(payload)
        except OSError as error:
            raise Gone from error

    def receive(self, silence_s: float | None = None) -> Message:
        """Wait for a message. Raises Gone, and Silent if it stops for `silence_s` before its end."""
        wait = None if silence_s is None else partial(self._has_more, math.ceil(silence_s / LOOK_S))
        header_bytes, payload_bytes = LENGTHS.unpack(self._exactly(LENGTHS.size, wait))
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise Gone
        return _header(self._exactly(header_bytes, wait)), self._exactly(payload_bytes, wait)

    def receive_hello(self, timeout_s: float) -> Header:
        """Wait at most `timeout_s` for a first message, without large allocations for an unverified sender.

        Raises Gone.
        """
        end = time.monotonic() + timeout_s  # one deadline for all parts, so that a slow sender cannot block rank 0

        def wait() -> bool:
            return bool(readable([self], end - time.monotonic()))

        header_bytes, payload_bytes = LENGTHS.unpack(self._exactly(LENGTHS.size, wait))
        if header_bytes > MAX_HELLO_BYTES or payload_bytes:
            raise Gone
        return _header(self._exactly(header_bytes, wait))

    def addresses(self) -> tuple[str, str]:
        """Return the host addresses of this end and of the other end of a TCP socket."""
        return self._stream.getsockname()[0], self._stream.getpeername()[0]

    def send_file(self, fd: int) -> None:
        """Send a copy of a file descriptor to the other end, a process on this machine. Raises Gone."""
        try:
            socket.send_fds(self._stream, [b"f"], [fd])
        except OSError as error:
            raise Gone from error

    def receive_file(self) -> int:
        """Return the file descriptor that `send_file` sent. Raises Gone."""
        try:
            _, fds, _, _ = socket.recv_fds(self._stream, 1, 1)
        except OSError as error:
            raise Gone from error
        if len(fds) != 1:
            raise Gone
        return fds[0]

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the other end has closed the socket. Drops what it sends meanwhile."""
        end = time.monotonic() + timeout_s
        with suppress(OSError):
            while readable([self], end - time.monotonic()) and self._stream.recv(1 << 16):
                pass

    def close(self) -> None:
        """Close the socket. The other end gets Gone, and so does a thread that receives here."""
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def _has_more(self, looks: int) -> bool:
        """Return whether bytes arrive within `looks` polls. While this process is stopped, only one poll passes."""
        return any(readable([self], LOOK_S) for _ in range(looks))

    def _exactly(self, count: int, wait: Callable[[], bool] | None = None) -> bytearray:
        """Return exactly `count` bytes.

        `wait` returns whether more bytes have arrived; if not, raises Silent. Raises Gone.
        """
        content = bytearray(count)
        view = memoryview(content)
        while view:
            if wait is not None and not wait():
                raise Silent
            try:
                received = self._stream.recv_into(view)
            except OSError as error:
                raise Gone from error
            if not received:
                raise Gone
            view = view[received:]
        return content


def readable(channels: Iterable[Channel], timeout_s: float) -> list[Channel]:
    """Wait at most `timeout_s`, and return the channels that have data or have ended, including channels closed by this
    process.
    """
    opened = {channel.fileno(): channel for channel in channels}
    if -1 in opened:
        return [opened[-1]]
    poll = select.poll()  # `select` is limited to file descriptors below 1024
    for fd in opened:
        poll.register(fd, select.POLLIN)
    return [opened[fd] for fd, _ in poll.poll(max(timeout_s, 0) * 1000)]


def _header(text: bytearray) -> Header:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Gone from error
    if not isinstance(header, dict):
        raise Gone
    return header
