"""The folder of compiled kernels. Their code runs as the user, so nobody else but root may own or change what is in it."""

import os
import shutil
import stat
import time
from pathlib import Path

from conf.errors import UserError

ABANDONED_AFTER_S = 24 * 60 * 60  # a compilation takes a minute or two


def cache_folder() -> Path:
    """The folder, without symbolic links in its path, made where it is missing.

    Raises UserError where another user could replace it: each folder of its path, up to the home folder, is looked at. Raises OSError where
    it cannot be made.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    folder = ((Path(given) if given else Path.home() / ".cache") / "quintet").resolve()
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)  # whatever the umask: what this makes, it does not refuse later
    home = Path(os.path.expanduser("~")).resolve()
    refuse_foreign(folder)
    for parent in folder.parents:
        _refuse(parent, "make it your own with chown and chmod go-w", allow_sticky=True)
        if parent == home:
            break
    return folder


def refuse_foreign(path: Path) -> None:
    """Raises UserError unless `path` is the user's own or root's, and nobody else can write to it."""
    _refuse(path, "remove it, and it is made anew", allow_sticky=False)


def _refuse(path: Path, remedy: str, allow_sticky: bool) -> None:
    """`allow_sticky`: in a folder like /tmp everybody may write, but nobody may move or remove what is another's."""
    found = path.stat()
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (allow_sticky and found.st_mode & stat.S_ISVTX)
    if found.st_uid in (os.geteuid(), 0) and not is_open:
        return
    reason = "can be written by other users" if is_open else f"belongs to another user (number {found.st_uid})"
    raise UserError(
        f"{path} {reason}, so compiled kernels from there could be theirs and are not loaded: {remedy}, "
        "or name a folder of your own in the environment variable XDG_CACHE_HOME"
    )


def remove_abandoned(folder: Path) -> None:
    """Remove what compilations that were killed left in the cache `folder`, once it is too old to be another process's."""
    for left in folder.glob("tmp*"):
        try:
            if time.time() - left.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(left)
        except OSError:  # another process removed it, or it cannot be removed: the next compilation tries again
            continue
