"""A folder of results that appears under its name when it is complete."""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from conf.errors import UserError
from models.formats.huggingface import CONFIG
from models.formats.manifest import MANIFEST

log = logging.getLogger(__name__)


@contextmanager
def only_maker(target: Path) -> Iterator[None]:
    """Another process that comes here with the same target says so and waits until this block, or its process, has ended."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.lock")
    lock = _lock(path, target)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # who waits for it makes another one
        os.close(lock)


def _lock(path: Path, target: Path) -> int:
    """The descriptor of a file that is there under its name and that no other process has locked."""
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
    """A folder beside `target`, which takes its name when the block ends well and is removed when it does not.

    It is empty, unless the block is `resumable`: then it is kept, and given again to the next one.
    Killed, the process leaves the hidden folder, and the next run with this target takes it over; killed between the two renames of an
    overwriting, it leaves the old model beside, hidden too. Raises UserError as `refuse_existing` does.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = (target.with_name(f".{target.name}.{what}") for what in ("partial", "replaced"))
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
                leftover.unlink()
            yield partial
            for path in (*partial.iterdir(), partial):
                _sync(path)
            refuse_existing(target, overwrite, task)  # by now there may be one
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
    """Raises UserError where anything is at `target`, or with `overwrite` what is no model and no empty folder."""
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
