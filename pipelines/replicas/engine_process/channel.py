"""The engine's end of the socket. `send` and `receive(waits=False)` never block the engine."""

import select
import socket
from contextlib import suppress

from pipelines.replicas.engine_process.frames import FrameReader, FromEngine, ToEngine, encode

CHUNK = 1 << 20  # bytes
MAX_CHUNKS = 8  # received per call of `receive`


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
        """Whether unsent bytes remain because the other end does not read."""
        return bool(self._unsent)

    @property
    def is_closed(self) -> bool:
        """Whether the other end has closed the socket and all bytes from it are received."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, frame: FromEngine) -> None:
        """Send a frame. Bytes that the socket does not accept now are kept for later calls."""
        self._unsent += encode(frame)
        self._send()

    def send_all(self, frame: FromEngine) -> None:
        """Send a frame and block until the socket accepts all of it, or is closed."""
        self.send(frame)
        while self._unsent:
            select.select((), (self._connection,), ())
            self._send()

    def wake(self) -> None:
        """End the current or the next blocking `receive`. May be called from any thread."""
        with suppress(BlockingIOError):  # enough wake-ups are pending
            self._waker.send(b"1")

    def receive(self, waits: bool) -> list[ToEngine] | None:
        """Return the frames that have arrived, or None if the other end has closed the socket.

        `waits`: block until data arrives, the socket accepts unsent bytes, or `wake` is called.

        Raises UserError for bytes that are not a frame.
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
        except OSError:  # the other end is closed; `receive` reports it
            self._unsent.clear()
