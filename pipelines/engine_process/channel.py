"""The engine's end of the socket. Nothing here makes the engine wait for the other end."""

import select
import socket
from contextlib import suppress

from pipelines.engine_process.frames import FrameReader, FromEngine, ToEngine, encode

CHUNK = 1 << 20  # bytes
MAX_CHUNKS = 8  # that are received at once


class Channel:
    """Sends and receives frames."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._reader = FrameReader(ToEngine)
        self._unsent = bytearray()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)

    @property
    def is_blocked(self) -> bool:
        """Whether earlier frames are still here, because the other end reads none."""
        return bool(self._unsent)

    @property
    def is_closed(self) -> bool:
        """Whether the other end has closed the socket, and all that it sent was received."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, frame: FromEngine) -> None:
        """Send a frame, or keep what the socket does not take now."""
        self._unsent += encode(frame)
        self._send()

    def send_all(self, frame: FromEngine) -> None:
        """Send a frame and wait until the socket has it, or is closed."""
        self.send(frame)
        while self._unsent:
            select.select((), (self._connection,), ())
            self._send()

    def wake(self) -> None:
        """End a wait of `receive`, or the next one. From any thread."""
        with suppress(BlockingIOError):  # enough wait for it
            self._waker.send(b"1")

    def receive(self, waits: bool) -> list[ToEngine] | None:
        """Return frames that have come, None where the other end has closed the socket.

        `waits`: until there is something to receive, the socket takes what was kept, or `wake` is called.

        Raises UserError for bytes that are no frame.
        """
        unsent = (self._connection,) if self._unsent else ()
        ready, _, _ = select.select((self._connection, self._woken), unsent, (), None if waits else 0)
        if self._woken in ready:
            self._woken.recv(CHUNK)
        self._send()
        frames: list[ToEngine] = []
        for _ in range(MAX_CHUNKS if self._connection in ready else 0):
            try:
                received = self._connection.recv(CHUNK)
            except BlockingIOError:
                return frames
            except OSError:
                return None
            if not received:
                return None
            frames += self._reader.read(received)
        return frames

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # nobody will read it: `receive` tells
            self._unsent.clear()
