"""The store behind /v1/files. Each file belongs to an API key and has an expiry time."""

import json
import re
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError
from pipelines.jobs.report import write_atomically
from pipelines.server.api.errors import ApiError, bad_request

DAY_S = 24 * 3600
KEPT_S = 30 * DAY_S  # default time until expiry
MAX_FILES = 1000  # per key
MAX_BYTES = 10 << 30  # per key; above it uploads are rejected
ID = re.compile(r"[\w-]{1,64}")  # also used as a file name


@dataclass(frozen=True)
class StoredFile:
    """An uploaded or generated file. Times are in seconds since 1970."""

    id: str
    owner: str | None
    """Name of the key that owns the file; None if the server has no keys."""
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def described(self) -> dict[str, Any]:
        """Return the file object of OpenAI's API."""
        values = asdict(self)
        del values["owner"]
        return {**values, "object": "file", "status": "processed", "status_details": None}


class FileStore:
    """The files of all keys. A file exists if its description (ID.json) exists."""

    def __init__(self, folder: Path) -> None:
        """Read the descriptions in `folder`. The folder is created if it is missing. Raises OSError, and UserError for
        an invalid description.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        files = [_read(path) for path in folder.glob("*.json")]
        self._files = {file.id: file for file in sorted(files, key=lambda file: (file.created_at, file.id))}
        for path in folder.glob("*.jsonl"):
            if path.stem not in self._files:  # the process ended between the writes of content and description
                path.unlink()

    def add(
        self, owner: str | None, filename: str, purpose: str, content: Iterable[bytes], kept_s: int | None = None
    ) -> StoredFile:
        """Store an upload. Raises ApiError (400) if the key has too many files or bytes, and OSError."""
        files = self.of(owner)
        if len(files) >= MAX_FILES:
            raise bad_request(f"there are {MAX_FILES} files, which is the maximum: delete some", "file")
        if (size := sum(file.bytes for file in files)) >= MAX_BYTES:
            raise bad_request(f"the files have {size} bytes, and the maximum is {MAX_BYTES}: delete some", "file")
        return self.put(new_id("file-"), owner, filename, purpose, content, kept_s)

    def put(
        self,
        id: str,
        owner: str | None,
        filename: str,
        purpose: str,
        content: Iterable[bytes],
        kept_s: int | None = None,
    ) -> StoredFile:
        """Store or replace the file with this id. `kept_s`: seconds until expiry. Raises OSError."""
        write_atomically(self.path(id), content)
        now = int(time.time())
        size = self.path(id).stat().st_size
        file = StoredFile(id, owner, filename, purpose, size, now, now + (kept_s or KEPT_S))
        write_atomically(self.path(id).with_suffix(".json"), [json.dumps(asdict(file))])
        self._files[id] = file
        return file

    def get(self, owner: str | None, id: str) -> StoredFile:
        """Return a file of a key. Raises ApiError (404), also for a file of another key."""
        file = self._files.get(id)
        if file is None or file.owner != owner or file.expires_at <= time.time():
            raise missing("file", id)
        return file

    def of(self, owner: str | None) -> list[StoredFile]:
        """Return the files of a key, oldest first."""
        now = time.time()
        return [file for file in list(self._files.values()) if file.owner == owner and file.expires_at > now]

    def path(self, id: str) -> Path:
        if not ID.fullmatch(id):
            raise ValueError(f"{id!r} is not an id")
        return self._folder / f"{id}.jsonl"

    def remove(self, id: str) -> None:
        """Delete a file. Raises OSError."""
        path = self.path(id)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        self._files.pop(id, None)

    def expire(self, used: Collection[str]) -> None:
        """Delete expired files, except files in `used`. Raises OSError."""
        now = time.time()
        for file in list(self._files.values()):
            if file.expires_at <= now and file.id not in used:
                self.remove(file.id)


def _read(path: Path) -> StoredFile:
    try:
        return StoredFile(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not the description of a file ({error}): delete it") from error


def new_id(prefix: str) -> str:
    """Return a new id that cannot be guessed. Ids increase with time."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def missing(kind: str, id: str) -> ApiError:
    """Return the error of status 404 for a file or batch that a key does not own."""
    folder = "/v1/files" if kind == "file" else "/v1/batches"
    return ApiError(404, f"there is no {kind} {id[:100]}: GET {folder} lists what there is", param="id")
