"""run.lock of a run's folder: the inputs, packages and processor that its results come from, for a replay.

A background thread hashes the inputs while the run works. Hashes of large files are kept for later runs.
"""

import functools
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from conf.errors import UserError
from conf.schema import RunConfig, Task
from kernels import build
from pipelines.jobs import report
from pipelines.jobs.hub_commits import hub_commits
from pipelines.jobs.input_files import input_files
from pipelines.jobs.output_folder import kept_folder

log = logging.getLogger(__name__)

LOCK = "run.lock"
PACKAGES = (*report.PACKAGES, "numpy", "sentencepiece", "tiktoken", "jinja2", "gguf", "llguidance", "lm-eval")
CODE = ("conf", "kernels", "models", "quantization", "pipelines")  # folders whose code determines results
BUFFER_BYTES = 1 << 20  # fits in a second-level cache; hashlib and readinto release the GIL for each
KEPT_BYTES = 1 << 20  # smaller files are hashed each time, in a millisecond
SETTLED_NS = 2_000_000_000  # a file that changed more recently may change again at the same time of its clock
NOTE_S = 1.0  # a longer wait at the end prints a line


class FileHash(NamedTuple):
    path: Path
    size: int
    mtime_ns: int
    inode: int
    sha256: str


class Stopped(Exception):
    """The run ended before a file was hashed."""


def hash_file(path: Path, is_stopped: Callable[[], bool] = lambda: False) -> FileHash:
    """Return a file's SHA-256, which is kept by path, size, modification time and inode.

    Raises OSError if the file cannot be read, and Stopped when `is_stopped`, which is called for each megabyte.
    """
    path = path.resolve()
    stat = path.stat()
    known = path, stat.st_size, stat.st_mtime_ns, stat.st_ino
    entry = kept_folder("hashes") / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    is_kept = stat.st_size >= KEPT_BYTES
    if is_kept and (digest := _read_entry(entry, known)):
        return FileHash(*known, digest)
    hashed = FileHash(*known, _sha256(path, is_stopped))
    if is_kept and time.time_ns() - stat.st_mtime_ns > SETTLED_NS and not has_changed(hashed):
        with suppress(OSError):  # a folder that cannot be written: the next run hashes again
            entry.parent.mkdir(parents=True, exist_ok=True)
            report.write_atomically(entry, [json.dumps([str(path), *hashed[1:]]) + "\n"])
    return hashed


def has_changed(hashed: FileHash) -> bool:
    """Return whether the file is missing, or has another size, time or inode than when it was hashed."""
    try:
        stat = hashed.path.stat()
    except OSError:
        return True
    return (stat.st_size, stat.st_mtime_ns, stat.st_ino) != (hashed.size, hashed.mtime_ns, hashed.inode)


def _read_entry(entry: Path, known: tuple[Path, int, int, int]) -> str | None:
    with suppress(OSError, ValueError, TypeError):
        *identity, digest = json.loads(entry.read_bytes())
        if identity == [str(known[0]), *known[1:]] and isinstance(digest, str):
            return digest
    return None


def _sha256(path: Path, is_stopped: Callable[[], bool]) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(BUFFER_BYTES))
    with open(path, "rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            digest.update(buffer[:size])
            if is_stopped():
                raise Stopped
    return digest.hexdigest()


@contextmanager
def locked(run: RunConfig, dump: report.Dump) -> Iterator[report.Dump]:
    """Hash the inputs of `run` in the block, which is the run. Write run.lock to its folder if the block succeeds.

    `run`: of `with_commits`. Yields `dump`, which also notes the folder and the final settings. A run that serves or
    chats writes the file as soon as the inputs are hashed, and a run without a folder writes none.
    """
    lock = _RunLock(run, dump)
    try:
        yield lock.dump
        lock.finish()
    finally:
        lock.stop()


class _RunLock:
    def __init__(self, run: RunConfig, dump: report.Dump) -> None:
        self._dump = dump
        self._final: tuple[RunConfig, Path] | None = None
        self._stopped = threading.Event()
        self._hashes: dict[Path, FileHash] = {}
        self._runs_on = run.task in (Task.serve, Task.chat)
        self._noted = threading.Event()
        self._thread = threading.Thread(target=self._hash, args=(run,), name=LOCK, daemon=True)
        self._thread.start()

    def dump(self, run: RunConfig, folder: Path) -> str:
        text = self._dump(run, folder)
        self._final = run, folder
        self._noted.set()
        return text

    def finish(self) -> None:
        """Wait for the thread, and write the files."""
        if self._final is None or self._runs_on:
            return
        self._thread.join(NOTE_S)
        if self._thread.is_alive():
            print(f"hashing the run's inputs for {LOCK}: once for each file", file=sys.stderr, flush=True)
            self._thread.join()
        self._write(*self._final)

    def stop(self) -> None:
        """End the thread, unless it has ended."""
        self._stopped.set()
        self._noted.set()
        self._thread.join()

    def _hash(self, run: RunConfig) -> None:
        # The run's own threads have precedence on a machine without idle cores. Linux has a priority for each thread.
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        with suppress(Stopped):
            for path in input_files(run).values():
                with suppress(OSError):
                    self._hashes[path] = hash_file(path, self._stopped.is_set)
            _software()
            self._noted.wait(None if self._runs_on else 0)
            if self._runs_on and self._final is not None and not self._stopped.is_set():
                self._write(*self._final)

    def _write(self, run: RunConfig, folder: Path) -> None:
        content = describe(run, self._current)
        report.write_atomically(folder / LOCK, [json.dumps(content, indent=2) + "\n"])
        environment = folder / "environment.json"
        if (commits := hub_commits(run)) and environment.is_file():
            values = json.loads(environment.read_bytes()) | {"hub_commits": commits}
            report.write_atomically(environment, [json.dumps(values, indent=2) + "\n"])

    def _current(self, path: Path) -> FileHash:
        hashed = self._hashes.get(path)
        if hashed is None or has_changed(hashed):
            if hashed is not None:
                log.warning("%s changed during the run: %s has its bytes at the run's end", path, LOCK)
            hashed = hash_file(path)
        return hashed


def describe(run: RunConfig, hashed: Callable[[Path], FileHash] = hash_file) -> dict[str, Any]:
    """Return the contents of run.lock. `run`: of `with_commits`. A file that cannot be read has neither bytes nor hash."""
    files: dict[str, dict[str, Any]] = {}
    for name, path in input_files(run).items():
        files[name] = {"path": str(path.absolute()), "bytes": None, "sha256": None}
        with suppress(OSError):
            files[name] |= {"bytes": (file := hashed(path)).size, "sha256": file.sha256}
    return {
        "files": files,
        **_software(),
        "processor": report.cpu_name(),
        "gpu": _gpu_name(run),
        "seeds": {"decode.seed": run.decode.seed, "calibrate.seed": run.calibrate.seed},
    }


def _gpu_name(run: RunConfig) -> str | None:
    """Return the GPU's name, in the processes that have imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or run.task is Task.serve or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())


@functools.cache
def _software() -> dict[str, Any]:
    """Return the packages, the instruction set and the library of the kernels, once per process."""
    instruction_set, library = _kernels()
    code = hashlib.sha256()
    for file in sorted(f for top in CODE for kind in ("*.py", "*.cpp", "*.h") for f in _sources(top, kind)):
        code.update(file.read_bytes())
    packages = {name: report.package_version(name) for name in PACKAGES}
    return {
        "packages": {"python": sys.version.split()[0], "quintet": f"code {code.hexdigest()[:16]}", **packages},
        "instruction_set": instruction_set,
        "kernels": None if library is None else {"library": library.name, "sha256": hash_file(library).sha256},
    }


def _sources(top: str, kind: str) -> Iterator[Path]:
    return (report.REPOSITORY / top).rglob(kind)


def _kernels() -> tuple[str | None, Path | None]:
    """Return the instruction set, and the library of the kernels that runs on this CPU load. Compiles nothing."""
    try:
        name = build.instruction_set()
        library = build.library_path(name)
    except (build.NotBuilt, UserError, OSError, RuntimeError):
        return None, None
    return name, library if library.is_file() else None
