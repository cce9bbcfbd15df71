"""The store of responses: an SQLite database in memory or in a file, bounded by bytes, count and age.

A fault of the database is a warning in the log. Reads then give status 503, and new responses are not stored.
"""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from conf.errors import UserError
from conf.serving import ServeConfig
from conf.support.sizes import num_bytes
from pipelines.server.api.errors import SERVER_ERROR, ApiError

log = logging.getLogger(__name__)

T = TypeVar("T")

MEMORY = "memory"
LOCKED_S = 0.2  # longest wait for the lock of another process
OURS = 0x51525350  # application id of the file
TABLES = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;  -- no fsync in each commit
PRAGMA application_id = {OURS};
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    created REAL NOT NULL,
    size INTEGER NOT NULL,
    response BLOB NOT NULL,
    items BLOB NOT NULL,
    UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS sizes ON responses (number, size, created);
"""


class StoredResponse(NamedTuple):
    """A response and the conversation before it."""

    response: dict[str, Any]
    """The response object of OpenAI's API."""
    items: list[dict[str, Any]]
    """All input items, also the input and output of earlier responses. So an earlier response may be deleted."""
    size: int
    """Number of bytes of both as JSON."""


class ResponseStore:
    """The stored responses of all API keys. One thread uses the database, so the event loop never waits for it."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.time) -> None:
        """`clock`: returns seconds since 1970. Raises UserError if the file cannot be created."""
        self._path = None if config.response_store == MEMORY else Path(str(config.response_store)).expanduser()
        self.max_conversation = num_bytes(config.max_body)
        """Most bytes of a stored response that a request can continue. Without a store the request would send them."""
        self._max_bytes = num_bytes(config.response_store_size)
        self._max_count = config.response_store_count
        self._age_s = config.response_store_age_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "responses")
        self._connection: sqlite3.Connection | None = None
        self._has_failed = False
        try:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            self._opened()
        except OSError as error:
            problem = f"serve.response_store={self._path} cannot be used ({error.strerror})"
            raise UserError(f"{problem}: give another file, or memory") from error
        except sqlite3.Error as error:
            self._warn(error)

    async def save(self, owner: str | None, response: dict[str, Any], items: list[dict[str, Any]]) -> bool:
        """Store or replace a response, and delete expired responses and the oldest ones beyond the limits.

        `owner`: name of the API key; None without keys. Return False if the response cannot be stored.
        """

        def insert(connection: sqlite3.Connection) -> bool:
            now, contents = self._clock(), (msgspec.json.encode(response), msgspec.json.encode(items))
            size = sum(map(len, contents))
            if size > self._max_bytes:
                limit = f"serve.response_store_size allows {self._max_bytes}"
                log.warning("a response with its conversation has %d bytes, and %s: it is not stored", size, limit)
                return False
            row = (owner or "", response["id"], now, size, *contents)
            columns = "(owner, id, created, size, response, items)"
            connection.execute(f"INSERT OR REPLACE INTO responses {columns} VALUES (?, ?, ?, ?, ?, ?)", row)
            self._evict(connection, now)
            return True

        try:
            return await self._run(insert)
        except ApiError:
            return False

    async def find(self, owner: str | None, id: str) -> StoredResponse | None:
        """Return a response of an API key; None if the key has none with this id. Raises ApiError (503)."""

        def select(connection: sqlite3.Connection) -> StoredResponse | None:
            query = "SELECT response, items, size FROM responses WHERE owner = ? AND id = ? AND created > ?"
            row = connection.execute(query, (owner or "", id, self._clock() - self._age_s)).fetchone()
            if row is None:
                return None
            response, items, size = row
            return StoredResponse(
                msgspec.json.decode(response, type=dict[str, Any]),
                msgspec.json.decode(items, type=list[dict[str, Any]]),
                size,
            )

        return await self._run(select)

    async def remove(self, owner: str | None, id: str) -> bool:
        """Delete a response of an API key. Return whether there was one. Raises ApiError (503)."""
        query = "DELETE FROM responses WHERE owner = ? AND id = ? AND created > ?"
        values = (owner or "", id, self._clock() - self._age_s)
        return await self._run(lambda connection: connection.execute(query, values).rowcount > 0)

    async def close(self) -> None:
        """Write everything to the file and close it."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of a transaction, run in the thread. Raises ApiError (503) if the database fails."""

        def transaction() -> T:
            try:
                with self._opened() as connection:
                    result = work(connection)
            except sqlite3.DatabaseError as error:
                if not isinstance(error, sqlite3.OperationalError):  # the file is corrupt
                    self._disconnect()
                raise
            self._has_failed = False
            return result

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except (sqlite3.Error, OSError, msgspec.DecodeError) as error:
            self._warn(error)
            message = "the stored responses cannot be used now: send the request again, or the whole conversation"
            raise ApiError(503, message, SERVER_ERROR, code="response_store", headers={"retry-after": "1"}) from error

    def _evict(self, connection: sqlite3.Connection, now: float) -> None:
        """Delete the oldest responses until all limits hold."""
        ((count, size),) = connection.execute("SELECT count(*), sum(size) FROM responses")
        numbers = []
        for number, row_size, created in connection.execute(
            "SELECT number, size, created FROM responses ORDER BY number"
        ):
            if count <= self._max_count and size <= self._max_bytes and created > now - self._age_s:
                break
            numbers.append((number,))
            count, size = count - 1, size - row_size
        connection.executemany("DELETE FROM responses WHERE number = ?", numbers)

    def _opened(self) -> sqlite3.Connection:
        """Return the connection. It is opened again after a lock or a corrupt file, which may be gone."""
        if self._connection is not None:
            return self._connection
        if self._path is not None:  # only this user may read it
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        # Later requests do not wait too: they would queue up behind each other.
        timeout_s = 0.0 if self._has_failed else LOCKED_S
        connection = sqlite3.connect(self._path or ":memory:", timeout=timeout_s, check_same_thread=False)
        try:
            # With an exclusive lock, WAL maps no file into memory. If such a file is cut, SIGBUS ends the process.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            ((num_tables,),) = connection.execute("SELECT count(*) FROM sqlite_master")
            ((application,),) = connection.execute("PRAGMA application_id")
            if num_tables and application != OURS:
                raise sqlite3.OperationalError("it is a database of another program")
            if self._path is not None:
                self._path.chmod(0o600)  # the file may be older
            connection.executescript(TABLES)
        except (sqlite3.Error, OSError):
            connection.close()
            raise
        self._connection = connection
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _warn(self, error: Exception) -> None:
        """Log the first of consecutive faults."""
        if not self._has_failed:
            log.warning(
                "serve.response_store=%s cannot be used (%s): responses are not stored", self._path or MEMORY, error
            )
        self._has_failed = True
