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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from conf.errors import UserError
from conf.schema import RunConfig, Task
from conf.support.signals import interrupts_waiting
from kernels import build
from pipelines.jobs import report
from pipelines.jobs.hub_commits import hub_commits
from pipelines.jobs.input_files import input_files
from pipelines.jobs.output_folder import kept_folder
from pipelines.jobs.report import LOCK

log = logging.getLogger(__name__)

PACKAGES = (*report.PACKAGES, "numpy", "scipy", "sentencepiece", "tiktoken", "jinja2", "gguf", "llguidance", "lm-eval")
CODE = ("conf", "kernels", "models", "quantization", "pipelines")  # folders whose code determines results
BUFFER_BYTES = 1 << 20  # stays in the second-level cache; hashlib and readinto release the GIL for each
KEPT_BYTES = 1 << 20  # smaller files are hashed each time, in a millisecond
SETTLED_NS = 2_000_000_000  # a file that changed more recently may change again at the same time of its clock
NOTED_BYTES = 10**9  # as many at the run's end print a line


class FileHash(NamedTuple):
    path: Path
    size: int
    mtime_ns: int
    inode: int
    sha256: str


class Hashing:
    """The SHA-256 of a file, which may stop and continue."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file does not exist."""
        self.path = path = path.resolve()
        stat = path.stat()
        self._known = path, stat.st_size, stat.st_mtime_ns, stat.st_ino
        self._entry = kept_folder("hashes") / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
        self._is_kept = stat.st_size >= KEPT_BYTES
        self._digest, self.num_bytes = hashlib.sha256(), 0
        digest = _read_entry(self._entry, self._known) if self._is_kept else None
        self.result = None if digest is None else FileHash(*self._known, digest)

    @property
    def num_waiting_bytes(self) -> int:
        return 0 if self.result else self._known[1] - self.num_bytes

    def run(self, is_stopped: Callable[[], bool]) -> FileHash | None:
        """Return the hash; None if `is_stopped`, which is called for each buffer. Raises OSError for a file that cannot
        be read."""
        if self.result is not None:
            return self.result
        buffer = memoryview(bytearray(BUFFER_BYTES))
        with open(self.path, "rb", buffering=0) as stream:
            stream.seek(self.num_bytes)
            while size := stream.readinto(buffer):
                self._digest.update(buffer[:size])
                self.num_bytes += size
                if is_stopped():
                    return None
        self.result = FileHash(*self._known, self._digest.hexdigest())
        self._keep(self.result)
        return self.result

    def _keep(self, hashed: FileHash) -> None:
        if self._is_kept and time.time_ns() - hashed.mtime_ns > SETTLED_NS and not has_changed(hashed):
            with suppress(OSError):  # a folder that cannot be written: the next run hashes again
                self._entry.parent.mkdir(parents=True, exist_ok=True)
                report.write_atomically(self._entry, [json.dumps([str(hashed.path), *hashed[1:]]) + "\n"])


def hash_file(path: Path) -> FileHash:
    """Return a file's SHA-256, which is kept by path, size, modification time and inode. Raises OSError."""
    hashed = Hashing(path).run(lambda: False)
    assert hashed is not None
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


@contextmanager
def locked(run: RunConfig, dump: report.Dump) -> Iterator[report.Dump]:
    """Hash the inputs of `run` in the block, which is the run. Write run.lock to its folder at the end.

    `run`: of `with_commits`. Yields `dump`, which also notes the folder and the final settings. A run that serves or
    chats writes the file as soon as the inputs are hashed, a run that measures hashes them at its end. A run without a
    folder, and a run that ends by an interrupt or a bug, write none.
    """
    lock = _RunLock(run, dump)
    try:
        yield lock.dump
        lock.finish()
    except (UserError, BrokenPipeError):  # results are written before a gate fails or a reader leaves
        lock.finish()
        raise
    finally:
        lock.stop()


class _RunLock:
    def __init__(self, run: RunConfig, dump: report.Dump) -> None:
        self._run, self._dump = run, dump
        self._final: tuple[RunConfig, Path] | None = None
        self._runs_on = run.task in (Task.serve, Task.chat)
        self._is_written = False
        self._hashings: dict[Path, Hashing] = {}
        self._has_folder, self._is_paused = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hash, name=LOCK, daemon=True)
        if run.task is not Task.bench:  # which measures: its inputs are hashed at its end
            with interrupts_waiting():  # the thread inherits it: a signal that the main thread blocks stays blocked
                self._thread.start()

    def dump(self, run: RunConfig, folder: Path) -> str:
        text = self._dump(run, folder)
        self._final = run, folder
        self._has_folder.set()
        return text

    def finish(self) -> None:
        """Hash what the thread has not hashed yet, on all cores, and write the files."""
        if self._final is None or not self._final[1].is_dir():
            return
        self.stop()
        if self._is_written:
            return
        run, folder = self._final
        for path in input_files(run).values():
            self._add(path)
        waiting = [hashing for hashing in self._hashings.values() if hashing.result is None]
        num_bytes = sum(hashing.num_waiting_bytes for hashing in waiting)
        if num_bytes > NOTED_BYTES:
            if self._run.task is Task.serve:  # a server that ends is not delayed
                return
            print(f"hashing {num_bytes / 1e9:.1f} GB for {LOCK}, once for each file", file=sys.stderr, flush=True)
        is_interrupted = threading.Event()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                list(pool.map(lambda hashing: _run_hashing(hashing, is_interrupted.is_set), waiting))
            except BaseException:  # Ctrl-C
                is_interrupted.set()
                raise
        self._write(run, folder)

    def stop(self) -> None:
        """End the thread at its next buffer."""
        self._is_paused.set()
        self._has_folder.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _add(self, path: Path) -> None:
        with suppress(OSError):
            if path not in self._hashings:
                self._hashings[path] = Hashing(path)

    def _hash(self) -> None:
        # The run's own threads have precedence on a machine without idle cores. Linux has a priority for each thread.
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for path in input_files(self._run).values():
            self._add(path)
        for hashing in self._hashings.values():
            if self._is_paused.is_set():
                return
            _run_hashing(hashing, self._is_paused.is_set)
        if not self._is_paused.is_set():
            _software()
        if self._runs_on:
            self._has_folder.wait()
            if self._final is not None and not self._is_paused.is_set():
                self._write(*self._final)

    def _write(self, run: RunConfig, folder: Path) -> None:
        content = describe(run, self._current)
        report.write_atomically(folder / LOCK, [json.dumps(content, indent=2) + "\n"])
        environment = folder / "environment.json"
        if (commits := hub_commits(run)) and environment.is_file():
            values = json.loads(environment.read_bytes()) | {"hub_commits": commits}
            report.write_atomically(environment, [json.dumps(values, indent=2) + "\n"])
        self._is_written = True

    def _current(self, path: Path) -> FileHash:
        hashing = self._hashings.get(path)
        if hashing is None or hashing.result is None:
            return hash_file(path)
        if has_changed(hashing.result):
            log.warning("%s changed during the run: %s has its bytes at the run's end", path, LOCK)
            return hash_file(path)
        return hashing.result


def _run_hashing(hashing: Hashing, is_stopped: Callable[[], bool]) -> None:
    with suppress(OSError):  # run.lock has no hash of a file that cannot be read
        hashing.run(is_stopped)


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
        "seeds": {
            "decode.seed": run.decode.seed,
            "calibrate.seed": run.calibrate.seed,
            "evaluate.seed": run.evaluate.seed,
        },
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
