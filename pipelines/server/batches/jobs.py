"""Jobs of /v1/batches. Each line is answered once, into a journal. A job continues after the process restarts."""

import asyncio
import fcntl
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from conf.errors import UserError
from pipelines.jobs.journal import Journal, dumps, open_journal
from pipelines.jobs.report import write_atomically
from pipelines.server.api.batches import BatchRequest, answer_line, error_line
from pipelines.server.api.errors import bad_request
from pipelines.server.batches.files import DAY_S, KEPT_S, FileStore, missing, new_id
from pipelines.server.batches.input import InputLine, check_lines, input_lines

log = logging.getLogger(__name__)

T = TypeVar("T")

WINDOW_S = DAY_S
MAX_UNFINISHED = 100  # per key
PAUSE_S = 1.0  # pause before a line is retried because no engine was available
RETRY_S = 30.0  # pause before a job is retried after a disk error
SWEEP_S = 600.0
PASSING = ("loading", "engine_gone", "draining")  # error codes after which a line is retried
ENDED = ("completed", "failed", "expired", "cancelled")
UNDONE = {  # error messages for lines that were not run, by the batch's final status
    "expired": "the batch's time was over before this line was run",
    "cancelled": "the batch was cancelled before this line was run",
}


class Reply(NamedTuple):
    """The server's answer to a line."""

    status: int
    request_id: str
    body: Any

    @property
    def code(self) -> str | None:
        """The error code, or None."""
        error = self.body.get("error") if self.status >= 400 and isinstance(self.body, dict) else None
        return error.get("code") if isinstance(error, dict) else None


@dataclass
class BatchJob:
    """A batch and its progress. Times are in seconds since 1970."""

    id: str
    owner: str | None
    """Name of the key that owns the batch."""
    input_file_id: str
    endpoint: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_kept_s: int = KEPT_S
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    """Time at which the batch entered each status after the first."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Errors of an input file that cannot be run."""
    total: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """Number of lines by outcome: `completed` or `failed`."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    def described(self) -> dict[str, Any]:
        """Return the batch object of OpenAI's API."""
        statuses = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        counts = {name: self.counts.get(name, 0) for name in ("completed", "failed")}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in statuses},
            "request_counts": {"total": self.total, **counts},
            "metadata": self.metadata,
        }


Send = Callable[[BatchJob, dict[str, Any]], Awaitable[Reply]]
"""Sends the body of a line to the server and returns the reply."""


class BatchJobs:
    """The batches and files of a folder, for one event loop. Only one process at a time can use the folder."""

    def __init__(self, folder: Path, max_running: int, max_line: int, clock: Callable[[], float] = time.time) -> None:
        """`max_running`: lines that run concurrently. `max_line`: maximum size of a line in bytes. `clock`: returns
        seconds since 1970.

        Raises UserError if the folder is not available.
        """
        try:
            (folder / "batches").mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.files = FileStore(folder / "files")
            paths = sorted((folder / "batches").glob("*/batch.json"))
            self._batches = {path.parent.name: _read(path) for path in paths}
        except BlockingIOError as error:
            raise UserError(f"serve.batches={folder} is used by another server: give another folder") from error
        except OSError as error:
            raise UserError(f"serve.batches={folder} cannot be used ({error.strerror}): give another folder") from error
        self._folder = folder / "batches"
        self._max_line = max_line
        self._clock = clock
        self._places = asyncio.Semaphore(max_running)  # first in, first out, so that batches progress concurrently
        # Lines that were running when the engine crashed are retried one at a time, because one may be the cause.
        self._alone = asyncio.Lock()
        self._disk = ThreadPoolExecutor(1, "batches")  # serializes all journal operations
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.send: Send | None = None
        """Answers lines. Set before `start`."""
        self._is_closing = False

    def start(self) -> None:
        """Continue the batches that have not ended."""
        self._tasks[""] = asyncio.create_task(self._sweep())
        for batch in self._batches.values():
            if batch.status not in ENDED:
                self._begin(batch)

    async def close(self) -> None:
        """Stop. Journals keep the finished lines. The next process reruns the lines that were in progress."""
        self._is_closing = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.to_thread(self._disk.shutdown)
        os.close(self._lock)

    async def create(self, owner: str | None, request: BatchRequest) -> BatchJob:
        """Create a batch and save it. Raises ApiError (400, 404), and OSError."""
        file = self.files.get(owner, request.input_file_id)
        if file.purpose != "batch":
            message = f"input_file_id={file.id} has the purpose {file.purpose}: give a file that was sent with batch"
            raise bad_request(message, "input_file_id")
        if sum(batch.status not in ENDED for batch in self.of(owner)) >= MAX_UNFINISHED:
            raise bad_request(f"{MAX_UNFINISHED} batches have not ended: wait for one, or cancel one", None)
        now = int(self._clock())
        after = request.output_expires_after
        kept_s = after.seconds if after else KEPT_S
        batch = BatchJob(
            new_id("batch_"), owner, file.id, request.endpoint, now, now + WINDOW_S, request.metadata, kept_s
        )
        self._batches[batch.id] = batch
        try:
            await self._on_disk(self._save, batch)
        except BaseException:
            del self._batches[batch.id]
            raise
        self._begin(batch)
        return batch

    def get(self, owner: str | None, id: str) -> BatchJob:
        """Return a batch of a key. Raises ApiError (404), also for a batch of another key."""
        batch = self._batches.get(id)
        if batch is None or batch.owner != owner:
            raise missing("batch", id)
        return batch

    def of(self, owner: str | None) -> list[BatchJob]:
        """Return the batches of a key, oldest first."""
        return [batch for batch in self._batches.values() if batch.owner == owner]

    async def cancel(self, owner: str | None, id: str) -> BatchJob:
        """Cancel a batch. The finished lines are written to its files. Raises ApiError (400, 404), and OSError."""
        batch = self.get(owner, id)
        if batch.status in (*ENDED, "finalizing"):
            raise bad_request(f"the batch {id} is {batch.status}: only one that runs can be cancelled", "batch_id")
        if batch.status != "cancelling":
            self._enter(batch, "cancelling")
            self._tasks[id].cancel()
            await self._on_disk(self._save, batch)
        return batch

    async def remove_file(self, owner: str | None, id: str) -> None:
        """Delete a file. Raises ApiError (400 if a batch reads the file, 404), and OSError."""
        self.files.get(owner, id)
        if id in self._used():
            raise bad_request(f"the file {id} is read by a batch: cancel that first", "id")
        await asyncio.to_thread(self.files.remove, id)

    def _used(self) -> set[str]:
        return {batch.input_file_id for batch in self._batches.values() if batch.status not in ENDED}

    def _enter(self, batch: BatchJob, status: str) -> None:
        batch.status = status
        batch.times[status] = int(self._clock())

    def _begin(self, batch: BatchJob) -> None:
        self._tasks[batch.id] = task = asyncio.create_task(self._run(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _on_disk(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, function, *arguments)

    def _save(self, batch: BatchJob) -> None:
        folder = self._folder / batch.id
        folder.mkdir(mode=0o700, exist_ok=True)
        write_atomically(folder / "batch.json", [json.dumps(asdict(batch))])

    async def _run(self, batch: BatchJob) -> None:
        """Run a batch to its end, also after cancellation and disk errors."""
        while batch.status not in ENDED:
            try:
                await self._advance(batch)
            except asyncio.CancelledError:
                if self._is_closing or batch.status != "cancelling":
                    raise
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
            except Exception as error:
                is_known = isinstance(error, OSError | UserError)
                log.error("%s continues in %g s: %s", batch.id, RETRY_S, error, exc_info=not is_known)
                await asyncio.sleep(RETRY_S)

    async def _advance(self, batch: BatchJob) -> None:
        """Do the next work of a batch, by its status. Raises OSError and UserError for disk errors."""
        path = self.files.path(batch.input_file_id)
        if batch.status == "validating":
            checked = await self._on_disk(check_lines, path, batch.endpoint, self._max_line)
            batch.total, batch.errors = checked.num_lines, checked.errors
            self._enter(batch, "failed" if batch.errors else "in_progress")
            await self._on_disk(self._save, batch)
        elif batch.total == 0:  # cancelled before its lines were counted
            self._enter(batch, "cancelled")
            await self._on_disk(self._save, batch)
        if batch.status in ENDED:
            return
        journal, batch.counts = await self._on_disk(_opened, self._folder / batch.id, batch.input_file_id)
        try:
            end = "cancelled" if batch.status == "cancelling" else "completed"
            if batch.status == "in_progress":
                try:
                    async with asyncio.timeout(batch.expires_at - self._clock()) as window:
                        await self._run_lines(batch, journal, path)
                    self._enter(batch, "finalizing")
                except TimeoutError:
                    if not window.expired():
                        raise
                    end = "expired"
                await self._on_disk(self._save, batch)
            await self._on_disk(self._write_files, batch, journal, path, end)
        finally:
            self._disk.submit(_close, journal)  # after the journal operations that are queued

    async def _run_lines(self, batch: BatchJob, journal: Journal, path: Path) -> None:
        """Run the lines that the journal lacks. Raises OSError and UserError for disk errors."""
        lines = _undone(path, journal)
        try:
            async with asyncio.TaskGroup() as group:
                while line := await self._on_disk(next, lines, None):
                    await self._places.acquire()
                    task = group.create_task(self._run_line(batch, journal, line))
                    task.add_done_callback(lambda _: self._places.release())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _run_line(self, batch: BatchJob, journal: Journal, line: InputLine) -> None:
        reply = await self._reply(batch, line.body)
        row = answer_line(_line_id(batch, line), line.custom_id, reply.status, reply.request_id, reply.body)
        await self._on_disk(_append, journal, line, row)
        name = "completed" if reply.status == 200 else "failed"
        batch.counts[name] = batch.counts.get(name, 0) + 1

    async def _reply(self, batch: BatchJob, body: dict[str, Any]) -> Reply:
        """Return the reply to a line. If the engine is not available, the line is retried.

        A line that was running when the engine ended is retried alone.
        """
        assert self.send
        is_suspect = False
        while True:
            async with self._alone if is_suspect else nullcontext():
                reply = await self.send(batch, body)
            if reply.code not in PASSING:
                return reply
            is_suspect |= reply.code == "engine_gone"
            await asyncio.sleep(PAUSE_S)

    def _write_files(self, batch: BatchJob, journal: Journal, path: Path, end: str) -> None:
        """Write the output and error files, then save the final status `end`. Lines that were not run get an error.

        Raises OSError and UserError.
        """
        for line in _undone(path, journal):
            _append(journal, line, error_line(_line_id(batch, line), line.custom_id, f"batch_{end}", UNDONE[end]))
        counts = dict(Counter(_outcome(record) for record in journal.records()))
        # Clients see the final status only after it is saved.
        ended = replace(batch, counts=counts, times=dict(batch.times))
        for outcome, name in (("completed", "output"), ("failed", "error")):
            if not counts.get(outcome):
                continue
            lines = (
                dumps(record["row"]["line"]).encode() + b"\n"
                for record in journal.records()
                if _outcome(record) == outcome
            )
            file_id = f"file-{batch.id.removeprefix('batch_')}-{name}"
            filename = f"{batch.id}_{name}.jsonl"
            self.files.put(file_id, batch.owner, filename, "batch_output", lines, batch.output_kept_s)
            setattr(ended, f"{name}_file_id", file_id)
        self._enter(ended, end)
        self._save(ended)
        journal.remove()
        vars(batch).update(vars(ended))

    async def _sweep(self) -> None:
        """Delete expired files, and batches that ended more than KEPT_S ago."""
        while True:
            try:
                await asyncio.to_thread(self.files.expire, self._used())
                for batch in list(self._batches.values()):
                    if batch.status in ENDED and self._clock() - batch.times[batch.status] > KEPT_S:
                        await asyncio.to_thread(shutil.rmtree, self._folder / batch.id)
                        del self._batches[batch.id]
            except OSError as error:
                log.warning("expired files cannot be deleted (%s)", error)
            await asyncio.sleep(SWEEP_S)


def _read(path: Path) -> BatchJob:
    try:
        return BatchJob(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not the description of a batch ({error}): delete its folder") from error


def _opened(folder: Path, input_file_id: str) -> tuple[Journal, dict[str, int]]:
    """Return the journal of a batch and its counts of outcomes so far. Raises OSError and UserError."""
    journal = open_journal("auto", folder, {"input": input_file_id})
    try:
        return journal, dict(Counter(_outcome(record) for record in journal.read()))
    except BaseException:
        journal.close()
        raise


def _close(journal: Journal) -> None:
    try:
        journal.sync()
    finally:
        journal.close()


def _undone(path: Path, journal: Journal) -> Iterator[InputLine]:
    return (line for line in input_lines(path) if not journal.has(line.index, line.digest))


def _append(journal: Journal, line: InputLine, row: dict[str, Any]) -> None:
    journal.append({"digest": line.digest, "row": {"index": line.index, "line": row}})


def _outcome(record: dict[str, Any]) -> str:
    response = record["row"]["line"]["response"]
    return "completed" if response is not None and response["status_code"] == 200 else "failed"


def _line_id(batch: BatchJob, line: InputLine) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{line.index}"
