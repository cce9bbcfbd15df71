"""Make a folder of results that appears under its final name when it is complete."""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from conf.errors import UserError
from models.formats.manifest import MANIFEST
from pipelines.jobs.report import REPOSITORY

log = logging.getLogger(__name__)

CONFIG = "config.json"  # not imported, because a server's HTTP process runs without torch


def kept_folder(kind: str) -> Path:
    """Return the folder of files that later runs reuse: `quantized` models, `packed` copies.

    QUINTET_OUTPUTS sets the parent folder.
    """
    return Path(os.environ.get("QUINTET_OUTPUTS") or REPOSITORY / "outputs") / kind


@contextmanager
def only_maker(target: Path) -> Iterator[None]:
    """Let one process at a time make `target`.

    Any other process logs that it waits, and waits until the block or the block's process ends.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.lock")
    lock = _lock(path, target)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # a waiting process creates a new lock file
        os.close(lock)


def _lock(path: Path, target: Path) -> int:
    """Create and lock the file at `path`, and return its descriptor. Waits while another process holds the lock."""
    while True:
        try:
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            remedy = "remove it, or name another folder: task=quantize quantize.output=FOLDER"
            raise UserError(f"{path} cannot be opened ({error.strerror}): {remedy}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another run is making %s: waiting for it", target)
            fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)


@contextmanager
def complete_folder(target: Path, overwrite: bool, task: str, resumable: bool = False) -> Iterator[Path]:
    """Yield a hidden folder next to `target`. It is renamed to `target` if the block succeeds, and removed if it fails.

    The folder is empty at the start. If the block is `resumable`, the folder of a failed block is kept, and the next
    block gets it. A killed process leaves the hidden folder, which the next run with this target takes over. If the
    process is killed between the two renames that replace a model, the old model stays in a second hidden folder.
    Raises UserError as `refuse_existing` does.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = (target.with_name(f".{target.name}.{suffix}") for suffix in ("partial", "replaced"))
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another run writes {task}.output={target}: wait for it, or give another folder"
            ) from error
        try:
            for leftover in () if resumable else partial.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield partial
            for path in (*partial.rglob("*"), partial):
                _sync(path)
            refuse_existing(target, overwrite, task)  # it may exist by now
            shutil.rmtree(replaced, ignore_errors=True)
            if target.exists():
                os.rename(target, replaced)
            os.rename(partial, target)
        except BaseException:
            if not resumable:
                shutil.rmtree(partial, ignore_errors=True)
            if replaced.exists() and not target.exists():
                os.rename(replaced, target)
            raise
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        os.close(lock)


def refuse_existing(target: Path, overwrite: bool, task: str) -> None:
    """Raise UserError if `target` exists; with `overwrite` only if it is neither a model nor an empty folder."""
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise UserError(f"{task}.output={target} exists: give another folder, or {task}.overwrite=true to replace it")
    is_model = any((target / name).is_file() for name in (CONFIG, MANIFEST))
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.is_symlink() or not (is_model or is_empty):
        raise UserError(
            f"{task}.output={target} is not the folder of a model, which alone is replaced: remove it yourself"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
