"""The handle of the engine's process and the socket to it."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol

REPOSITORY = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-P", "-m", "pipelines.replicas.engine_process")
CHUNK = 1 << 20  # bytes
END_S = 5.0  # grace period for a process that has closed its socket


class Child(Protocol):
    """An engine process, on this machine or on another one."""

    def write(self, content: bytes) -> None:
        """Send bytes without blocking."""

    def write_eof(self) -> None:
        """Tell the process to end."""

    async def read(self) -> bytes:
        """Return the next bytes, or b"" if the process has closed its end."""

    def kill(self) -> None:
        """End the process."""

    async def ended(self) -> str:
        """Wait a short time for the process to end. Return a phrase that says how it ended."""

    async def close(self) -> None:
        """Release the process and all its resources."""


class LocalChild:
    """The engine's process on this machine."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> "LocalChild":
        """Start a process. Raises OSError."""
        parent_end, child_end = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                str(child_end.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
                process_group=0,  # an interrupt from the terminal must reach only the parent
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError:
            parent_end.close()
            raise
        finally:
            child_end.close()
        return cls(process, *await asyncio.open_connection(sock=parent_end))

    def write(self, content: bytes) -> None:
        self._writer.write(content)

    def write_eof(self) -> None:
        """Close this end of the socket. The process then ends."""
        self._writer.write_eof()

    async def read(self) -> bytes:
        with suppress(ConnectionError):  # the process ended before it read all that was sent
            return await self._reader.read(CHUNK)
        return b""

    def kill(self) -> None:
        """Kill the process and its child processes."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def ended(self) -> str:
        """Wait at most `END_S` for the process to end. Return a phrase that says how it ended."""
        await asyncio.wait([asyncio.ensure_future(self._process.wait())], timeout=END_S)
        returncode = self._process.returncode
        if returncode is None:
            return "closed its socket"
        if returncode < 0:
            return f"was ended by {signal.Signals(-returncode).name}"
        return f"ended with exit code {returncode}"

    async def close(self) -> None:
        """Kill the process and wait until it has ended."""
        self._writer.close()
        self.kill()
        await self._process.wait()
