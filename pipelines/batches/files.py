"""Files of /v1/files in a folder: each belongs to a key, and each has an end."""

import json
import re
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError
from pipelines.api.errors import ApiError, bad_request
from pipelines.report import write_atomically

DAY_S = 24 * 3600
KEPT_S = 30 * DAY_S  # where nothing is said
MAX_FILES = 1000  # of a key
MAX_BYTES = 10 << 30  # of a key: from there on nothing more is uploaded
ID = re.compile(r"[\w-]{1,64}")  # which is also a name of a file


@dataclass(frozen=True)
class StoredFile:
    """An uploaded or written file and its properties. Times are seconds since 1970."""

    id: str
    owner: str | None
    """Name of the key that it belongs to; None where the server has no keys."""
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def described(self) -> dict[str, Any]:
        """Return it in OpenAI's shape."""
        values = asdict(self)
        del values["owner"]
        return {**values, "object": "file", "status": "processed", "status_details": None}


class FileStore:
    """The files of all keys. A file is there when its description is."""

    def __init__(self, folder: Path) -> None:
        """Read the descriptions in `folder`, which is made where it is missing. Raises OSError, and UserError for one that is broken."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        files = [_read(path) for path in folder.glob("*.json")]
        self._files = {file.id: file for file in sorted(files, key=lambda file: (file.created_at, file.id))}
        for path in folder.glob("*.jsonl"):
            if path.stem not in self._files:  # the process ended between the content and the description
                path.unlink()

    def add(
        self, owner: str | None, filename: str, purpose: str, content: Iterable[bytes], kept_s: int | None = None
    ) -> StoredFile:
        """Store an upload. Raises ApiError (400) where the key has too many files or bytes of them, and OSError."""
        files = self.of(owner)
        if len(files) >= MAX_FILES:
            raise bad_request(f"there are {MAX_FILES} files, the most that there may be: delete some", "file")
        if (size := sum(file.bytes for file in files)) >= MAX_BYTES:
            raise bad_request(f"the files have {size} bytes, and {MAX_BYTES} is the most: delete some", "file")
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
        """Store a file under an id, instead of one that has it. kept_s: seconds until it is deleted. Raises OSError."""
        write_atomically(self.path(id), content)
        now = int(time.time())
        size = self.path(id).stat().st_size
        file = StoredFile(id, owner, filename, purpose, size, now, now + (kept_s or KEPT_S))
        write_atomically(self.path(id).with_suffix(".json"), [json.dumps(asdict(file))])
        self._files[id] = file
        return file

    def get(self, owner: str | None, id: str) -> StoredFile:
        """Return a file of a key. Raises ApiError (404) for another key's, too."""
        file = self._files.get(id)
        if file is None or file.owner != owner or file.expires_at <= time.time():
            raise missing("file", id)
        return file

    def of(self, owner: str | None) -> list[StoredFile]:
        """Return the files of a key, in the order in which they came."""
        now = time.time()
        return [file for file in list(self._files.values()) if file.owner == owner and file.expires_at > now]

    def path(self, id: str) -> Path:
        """Return where the content of a file is."""
        if not ID.fullmatch(id):
            raise ValueError(f"{id!r} is no id")
        return self._folder / f"{id}.jsonl"

    def remove(self, id: str) -> None:
        """Delete a file. Raises OSError."""
        path = self.path(id)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        self._files.pop(id, None)

    def expire(self, used: Collection[str]) -> None:
        """Delete the files whose time is over, but for those that are used. Raises OSError."""
        now = time.time()
        for file in list(self._files.values()):
            if file.expires_at <= now and file.id not in used:
                self.remove(file.id)


def _read(path: Path) -> StoredFile:
    try:
        return StoredFile(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no description of a file ({error}): delete it") from error


def new_id(prefix: str) -> str:
    """Return an id that nobody guesses; later ones are greater."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def missing(kind: str, id: str) -> ApiError:
    """Return the error of status 404 for what a key does not have."""
    folder = "/v1/files" if kind == "file" else "/v1/batches"
    return ApiError(404, f"there is no {kind} {id[:100]}: GET {folder} lists what there is", param="id")
