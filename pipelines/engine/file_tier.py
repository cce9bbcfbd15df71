"""The file tier of the KV cache: contents of evicted blocks in a file, which a later process of the same model reads.

The file has a header of PAGE bytes, a table with an entry for each place, and the contents, each C bytes long. An entry
holds the hash of the content's block, a checksum and the number of its write. A thread writes: it clears an entry
before it overwrites the content, and writes the entry after the content. So a process that is killed leaves no entry of
a torn content, and after a power failure the checksum finds it.
"""

import fcntl
import hashlib
import logging
import os
import struct
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from pipelines.engine.memory_tier import check_places

FILE = "kv_cache.tier"
MAGIC = b"quintet kv cache tier 1\n"
PAGE = 4096
HEADER = struct.Struct("<24s32sQQ")  # MAGIC, the identity, the number of places, C
ENTRY = struct.Struct("<32s16sQ8x")  # hash, checksum, number of the write, from 1
CLEARED = bytes(ENTRY.size)
MAX_NUMBER = 2**62  # larger numbers are damaged
QUEUE_BYTES = 2**28
"""Most bytes of contents that wait to be written. If more come, the oldest of them are dropped."""

log = logging.getLogger(__name__)


class FileTier:
    """A bounded file of contents, with the methods of `MemoryTier`. Contents that wait to be written are found too."""

    def __init__(self, folder: Path, max_bytes: int, identity: bytes, num_bytes: int) -> None:
        """Open or create the file in `folder`, at most `max_bytes` long.

        `identity`: the sha256 of all that the contents depend on besides their hashes. `num_bytes`: C. A file of another
        identity or size is emptied, with a warning. Raises UserError if the folder cannot be written, another process
        uses the file, `max_bytes` is less than one content, or the disk has too little space.
        """
        self.num_contents = (max_bytes - 2 * PAGE) // (ENTRY.size + num_bytes)
        path = folder / FILE
        if self.num_contents < 1:
            least = 2 * PAGE + ENTRY.size + num_bytes
            raise _refusal(f"{max_bytes} bytes hold no block: give at least {least}")
        fd = _open_locked(path)
        try:
            _check_space(path, fd, max_bytes)
            header = HEADER.pack(MAGIC, identity, self.num_contents, num_bytes)
            self._records = _Records(path, fd, header, self.num_contents, num_bytes)
        except OSError as error:
            os.close(fd)
            raise _not_writable(path, error) from error
        except UserError:
            os.close(fd)
            raise
        self._writer = threading.Thread(target=self._records.write_pending, name="kv-cache-file-tier", daemon=True)
        self._writer.start()
        self.close = weakref.finalize(self, _close, self._records, self._writer)
        """Writes the waiting contents and closes the file. Runs when this object is garbage-collected and at exit."""

    def wants(self, value: bytes) -> bool:
        return self._records.wants(value)

    def put(self, value: bytes, content: Tensor) -> None:
        self._records.put(value, content.clone())  # the row is a view of many contents

    def begin_last(self, num_contents: int) -> None:
        """Begin to write at most this number of contents by `put_last`, before the process ends."""
        self._records.begin_last(num_contents)

    def put_last(self, value: bytes, content: Tensor) -> None:
        """Write a wanted content, after waiting for room in the queue. The caller begins with the last used content."""
        self._records.put(value, content, waits=True)

    def get(self, value: bytes) -> Tensor | None:
        return self._records.get(value)

    def check_integrity(self) -> None:
        self._records.check_integrity()


class _Records:
    """The open file, its table in memory, and the contents that wait. The engine's thread and the writer share it."""

    def __init__(self, path: Path, fd: int, header: bytes, num_places: int, num_bytes: int) -> None:
        self._path, self.fd, self._num_places, self._num_bytes = path, fd, num_places, num_bytes
        self._first_content = -(-(PAGE + ENTRY.size * num_places) // PAGE) * PAGE
        self._changed = threading.Condition()  # guards all that follows
        self._pending: dict[bytes, Tensor] = {}  # oldest first
        self._max_pending = max(1, QUEUE_BYTES // num_bytes)
        self._written: tuple[bytes, Tensor] | None = None  # the content that is being written
        self._is_ending = self._is_failed = self._has_warned = False
        self._places, self._free, self._num_writes = self._read_table(header)
        self._step = 1  # from one write's number to the next

    def wants(self, value: bytes) -> bool:
        with self._changed:
            place = self._places.pop(value, None)
            if place is not None:
                self._places[value] = place
            return place is None and self._waiting(value) is None and not (self._is_failed or self._is_ending)

    def begin_last(self, num_contents: int) -> None:
        with self._changed:  # the first content gets the largest number, as the last used one
            self._num_writes, self._step = self._num_writes + num_contents + len(self._pending) + 2, -1

    def put(self, value: bytes, content: Tensor, waits: bool = False) -> None:
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: len(self._pending) < self._max_pending or self._is_failed)
            if self._is_failed:
                return
            while len(self._pending) >= self._max_pending:
                del self._pending[next(iter(self._pending))]
            self._pending[value] = content
            self._changed.notify_all()

    def get(self, value: bytes) -> Tensor | None:
        with self._changed:
            place = self._places.get(value)
            if place is None:
                return self._waiting(value)
        content = bytearray(self._num_bytes)
        try:
            checksum = os.pread(self.fd, ENTRY.size, PAGE + ENTRY.size * place)[32:48]
            is_whole = os.preadv(self.fd, [content], self._offset(place)) == self._num_bytes
        except OSError:
            is_whole = False
        if is_whole and _checksum(value, content) == checksum:
            return torch.frombuffer(content, dtype=torch.uint8)
        self._forget(value, place)
        return None

    def write_pending(self) -> None:
        """Write contents until `end` is called and none waits, or a write fails."""
        while (item := self._next()) is not None:
            value, content, place, number = item
            try:
                self._write(value, content, place, number)
            except OSError as error:
                self._fail(place, error)
                return
            with self._changed:
                self._places[value], self._written = place, None

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def check_integrity(self) -> None:
        with self._changed:
            places = [*self._free, *self._places.values()]
            num_places = self._num_places
            if self._written is not None:  # its place is in neither list
                places += sorted({*range(num_places)} - {*places})[:1]
        check_places(places, num_places, "the file tier")

    def _waiting(self, value: bytes) -> Tensor | None:
        if self._written is not None and self._written[0] == value:
            return self._written[1]
        return self._pending.get(value)

    def _next(self) -> tuple[bytes, Tensor, int, int] | None:
        """Wait for a content, and return it with a place, whose earlier content is no longer found, and a number."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_ending)
            if not self._pending:
                return None
            value = next(iter(self._pending))
            self._written = value, self._pending.pop(value)
            self._changed.notify_all()
            place = self._free.pop() if self._free else self._places.pop(next(iter(self._places)))
            self._num_writes += self._step
            return *self._written, place, self._num_writes

    def _write(self, value: bytes, content: Tensor, place: int, number: int) -> None:
        entry = PAGE + ENTRY.size * place
        data = content.numpy().data
        _write_all(self.fd, memoryview(CLEARED), entry)
        _write_all(self.fd, data, self._offset(place))
        _write_all(self.fd, memoryview(ENTRY.pack(value, _checksum(value, data), number)), entry)

    def _fail(self, place: int, error: OSError) -> None:
        with self._changed:
            self._is_failed, self._written = True, None
            self._pending.clear()
            self._free.append(place)
            self._changed.notify_all()
        log.warning("device.kv_cache_tiers: %s cannot be written (%s): it is only read now", self._path, error.strerror)

    def _forget(self, value: bytes, place: int) -> None:
        """Remove a damaged content, unless the writer has overwritten it since its place was found."""
        with self._changed:
            if self._places.get(value) != place:
                return
            del self._places[value]
            self._free.append(place)
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            log.warning(
                "device.kv_cache_tiers: %s has a damaged block, which is ignored and computed again", self._path
            )

    def _read_table(self, header: bytes) -> tuple[dict[bytes, int], list[int], int]:
        """Return the place of each hash, oldest first, the free places, and the number of writes so far."""
        size = self._first_content + self._num_places * self._num_bytes
        old_size = os.fstat(self.fd).st_size
        if old_size != size or os.pread(self.fd, len(header), 0) != header:
            if old_size:
                cause = "is damaged, or of another model, setting, version or size"
                log.warning("device.kv_cache_tiers: %s %s: its blocks are ignored and replaced", self._path, cause)
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, size)
            _write_all(self.fd, memoryview(header), 0)
        table = os.pread(self.fd, ENTRY.size * self._num_places, PAGE)
        entries = sorted(
            (number, value, place)
            for place, (value, _, number) in enumerate(ENTRY.iter_unpack(table))
            if 0 < number < MAX_NUMBER
        )
        places = {value: place for number, value, place in entries}
        used = {*places.values()}
        free = [place for place in range(self._num_places - 1, -1, -1) if place not in used]
        return places, free, max((number for number, *_ in entries), default=0)

    def _offset(self, place: int) -> int:
        return self._first_content + self._num_bytes * place


def _close(records: _Records, writer: threading.Thread) -> None:
    records.end()
    writer.join()
    os.close(records.fd)


def _checksum(value: bytes, content: bytearray | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=16, key=value).digest()


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        num_written = os.pwrite(fd, data, offset)
        data, offset = data[num_written:], offset + num_written


def _open_locked(path: Path) -> int:
    """Open or create the file for this process alone. Only its owner may read it: it holds prompts."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _not_writable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o600)  # the file may be older
    except BlockingIOError as error:
        os.close(fd)
        raise _refusal(f"another process uses {path}: give each process its own folder") from error
    except OSError as error:  # a file system without locks, or a file of another user
        os.close(fd)
        raise _not_writable(path, error) from error
    return fd


def _check_space(path: Path, fd: int, max_bytes: int) -> None:
    disk, own = os.statvfs(path), 512 * os.fstat(fd).st_blocks
    if max_bytes > (free := disk.f_bavail * disk.f_frsize + own):
        raise _refusal(f"{max_bytes} bytes are more than the {free} that {path} may take: give fewer bytes")


def _not_writable(path: Path, error: OSError) -> UserError:
    return _refusal(f"{path} cannot be written ({error.strerror}): give another folder")


def _refusal(problem: str) -> UserError:
    return UserError(f"device.kv_cache_tiers: {problem}, or leave the file tier out")
