"""The journal of a job: a file of finished rows, from which the job resumes after it was killed at any moment.

The first line holds the job's fingerprint and the seed of its rows. Each further line is a row, in the order in which
rows finished. Each line is written by one call and synced to disk within about a second, so only the last line may be
incomplete. Memory holds the offset and the digest of each line, 16 bytes per row.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.errors import UserError

NAME = "journal.jsonl"
UNNAMED = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d{6}")  # a run folder's default name
SYNC_S = 1.0  # maximum work, in seconds, that is lost in a power failure
MAX_RUNNING = 2**20  # at once: an index above the number of finished rows plus MAX_RUNNING is invalid
BEGIN_AGAIN = "begin again with predict.resume=none"

SEED = "seed"  # key in the first line, next to the fingerprint

Fingerprint = dict[str, Any]
"""Everything that determines a job's rows, by name: its value, or a digest of it."""


class Journal:
    """The locked journal of a job. The lock ensures that only one run writes it and that each row is done once."""

    def __init__(self, folder: Path, fd: int, fingerprint: Fingerprint) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.seed: int | None = fingerprint.get("decode.seed")
        """Seed of the rows that set no seed. Drawn at random if the job sets no seed either."""
        self.num_rows = 0
        self._fd = fd
        self._size = 0  # of all complete lines
        self._offsets = array("Q")  # by row index; 0, the offset of the fingerprint, means not done
        self._digests = array("Q")
        self._synced_at = time.monotonic()

    @property
    def path(self) -> Path:
        return self.folder / NAME

    @property
    def kept(self) -> str:
        """Return a message for a job that ends early: the number of finished rows, and the command that resumes it."""
        same_input = "" if self.fingerprint["input"] else " < THE SAME INPUT"
        command = f"python run.py {shlex.quote(f'predict.resume={self.folder}')}{same_input}"
        return f"{self.num_rows} rows are done and kept, go on with: {command}"

    @property
    def end(self) -> int:
        """Return the largest finished index plus 1."""
        return len(self._offsets)

    def has(self, index: int, digest: str) -> bool:
        """Return whether a row is done. Raises UserError if it was done for another input line."""
        done = index < self.end and self._offsets[index] > 0
        if done and self._digests[index] != int(digest, 16):
            raise UserError(
                f"row {index} differs from the row that {self.folder} contains: give the same input, or {BEGIN_AGAIN}"
            )
        return done

    def append(self, record: dict[str, Any]) -> None:
        """Append a record: the row of predictions.jsonl as `row`, and the `digest` of its input."""
        line = dumps(record).encode() + b"\n"
        with self.writing():
            self._write(line)
            self._note(record, self._size)
            self._size += len(line)
            if time.monotonic() - self._synced_at > SYNC_S:
                self.sync()

    def sync(self) -> None:
        with self.writing():
            os.fsync(self._fd)
        self._synced_at = time.monotonic()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Convert an OSError in the block, such as a full or missing disk, to a UserError that says how to resume."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written ({error.strerror or error}): {self.kept}") from error

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records in row order."""
        with open(self.path, "rb") as file:
            for offset in self._offsets:
                assert offset, "a row is missing"
                file.seek(offset)
                yield json.loads(file.readline())

    def remove(self) -> None:
        """Delete the journal of a job whose files are complete."""
        with self.writing():
            self.path.unlink()

    def close(self) -> None:
        os.close(self._fd)  # also releases the lock

    def begin(self) -> None:
        """Start again: empty the file and write the fingerprint, with a random seed if it has none."""
        os.ftruncate(self._fd, 0)
        self._size = 0
        self.seed = secrets.randbits(32) if self.seed is None else self.seed
        header = dumps({**self.fingerprint, SEED: self.seed}).encode() + b"\n"
        self._write(header)
        self._size = len(header)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records in file order, and truncate an incomplete last line.

        Raises UserError for a broken line elsewhere.
        """
        with open(self.path, "rb") as file:
            self._size = len(file.readline())
            for number, line in enumerate(file, 2):
                record = _parse(line, self.num_rows + MAX_RUNNING)
                if record is None and file.read(1):
                    raise UserError(f"line {number} of {self.path} is broken: delete that file, or {BEGIN_AGAIN}")
                if record is None:
                    break
                if self._note(record, self._size):
                    yield record
                self._size += len(line)
        os.ftruncate(self._fd, self._size)

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._size)  # drop the incomplete line
            raise

    def _note(self, record: dict[str, Any], offset: int) -> bool:
        """Store the offset and digest of a row's line. Return whether the row is new."""
        index = record["row"]["index"]
        missing = index + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.frombytes(bytes(8 * missing))
            self._digests.frombytes(bytes(8 * missing))
        elif self._offsets[index]:
            return False
        self._offsets[index] = offset
        self._digests[index] = int(record["digest"], 16)
        self.num_rows += 1
        return True


def open_journal(resume: str, output_dir: Path, fingerprint: Fingerprint) -> Journal:
    """Return the journal for `predict.resume`.

    Call `read()` if it has rows. Raises UserError if it cannot be resumed.
    """
    if resume not in ("auto", "none"):
        return _continued(named_folder(resume), fingerprint)
    if resume == "auto":
        if (output_dir / NAME).exists():
            return _continued(output_dir, fingerprint)
        if fingerprint["input"] and UNNAMED.fullmatch(output_dir.name):
            for folder in _unfinished(output_dir.parent, fingerprint):
                if journal := _lock(folder, fingerprint):
                    journal.seed = _seed_of(_header(folder) or {})
                    return journal
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / NAME).touch()
    journal = _lock(output_dir, fingerprint)
    if journal is None:
        raise _in_use(output_dir)
    try:
        journal.begin()
    except OSError:
        journal.path.unlink()
        journal.close()
        raise
    return journal


def named_folder(resume: str) -> Path:
    """Return the folder of `predict.resume`. Raises UserError if it has no job to resume."""
    folder = Path(resume).expanduser().absolute()
    if not (folder / NAME).is_file():
        finished = " (its job is finished)" if (folder / "predictions.jsonl").is_file() else ""
        raise UserError(
            f"predict.resume={resume} has no {NAME}{finished}: give the folder of an unfinished job, auto or none"
        )
    return folder


def _continued(folder: Path, fingerprint: Fingerprint) -> Journal:
    journal = _lock(folder, fingerprint)
    if journal is None:
        raise _in_use(folder)
    header = _header(folder)
    if header is None:  # killed before the header was complete, so there are no rows
        journal.begin()
        return journal
    if changes := _changes(_as_given(header, fingerprint), fingerprint):
        journal.close()
        raise UserError(
            f"{folder} cannot be resumed, because these values changed: {', '.join(changes)}. Restore the old values, or {BEGIN_AGAIN}"
        )
    journal.seed = _seed_of(header)
    return journal


def _in_use(folder: Path) -> UserError:
    return UserError(f"another run is writing {folder}: wait until it ends, or give another hydra.run.dir")


def _unfinished(parent: Path, fingerprint: Fingerprint) -> list[Path]:
    """Return the folders in `parent` with an unfinished job of the same fingerprint, newest first."""
    folders = sorted((path.parent for path in parent.glob(f"*/{NAME}") if os.access(path, os.W_OK)), reverse=True)
    return [folder for folder in folders if UNNAMED.fullmatch(folder.name) and _is_of(folder, fingerprint)]


def _is_of(folder: Path, fingerprint: Fingerprint) -> bool:
    try:
        header = _header(folder)
        return header is not None and _as_given(header, fingerprint) == fingerprint
    except (OSError, UserError):  # removed meanwhile, or broken: not a job to resume
        return False


def _lock(folder: Path, fingerprint: Fingerprint) -> Journal | None:
    """Lock and return the folder's journal; None if another process holds the lock, or has removed the file."""
    try:
        fd = os.open(folder / NAME, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if not os.fstat(fd).st_nlink:
        os.close(fd)
        return None
    return Journal(folder, fd, fingerprint)


def _as_given(header: Fingerprint, fingerprint: Fingerprint) -> Fingerprint:
    """Return the fingerprint in a journal's first line, for comparison with `fingerprint`.

    A journal without a given seed has a drawn seed. If `fingerprint` gives exactly this seed, as a saved config.yaml
    does, the result has the seed too, so that the two are equal.
    """
    before = {name: value for name, value in header.items() if name != SEED}
    if "decode.seed" in before and before["decode.seed"] is None and _seed_of(header) == fingerprint.get("decode.seed"):
        before["decode.seed"] = fingerprint["decode.seed"]
    return before


def _seed_of(header: Fingerprint) -> int:
    """Return the seed of the rows that set no seed.

    Journals of an earlier version have no seed. For these it is a digest of the first line, so that every run that
    resumes the journal uses the same seed.
    """
    seed: int | None = header.get(SEED, header.get("decode.seed"))
    digest = hashlib.blake2b(dumps(header).encode(), digest_size=4).digest()
    return int.from_bytes(digest) if seed is None else seed


def _header(folder: Path) -> Fingerprint | None:
    """Return the first line of the folder's journal; None if it is incomplete."""
    with open(folder / NAME, "rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        return None
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise UserError(f"line 1 of {folder / NAME} is broken: delete that file, or {BEGIN_AGAIN}") from error


def _changes(before: Fingerprint, now: Fingerprint) -> list[str]:
    names = [name for name in before | now if before.get(name) != now.get(name)]
    return [f"{name} ({_short(before.get(name))} -> {_short(now.get(name))})" for name in names]


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:12]}..."


def _parse(line: bytes, last_index: int) -> dict[str, Any] | None:
    """Return a line's record; None if it is incomplete or invalid.

    An index above `last_index` is invalid: memory grows with it.
    """
    try:
        record = json.loads(line) if line.endswith(b"\n") else {}
        index, digest = record["row"]["index"], int(record["digest"], 16)
    except (ValueError, KeyError, TypeError):
        return None
    return record if type(index) is int and 0 <= index <= last_index and 0 <= digest < 2**64 else None


def dumps(value: object) -> str:
    """Return a value as one line of JSON.

    Half a surrogate pair, which an id or an error may contain, becomes its JSON escape.
    """
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
