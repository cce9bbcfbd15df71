"""The folder of compiled kernels. Their code runs as the user, so only the user and root may own or change its
contents."""

import grp
import os
import pwd
import shutil
import stat
import time
from pathlib import Path

from conf.errors import UserError

ABANDONED_AFTER_S = 24 * 60 * 60  # a compilation takes one to two minutes


def cache_folder() -> Path:
    """Return the cache folder with symbolic links resolved. Creates it if it is missing.

    Raises UserError if another user could replace it: every folder of its path, up to the home folder, is checked.
    Raises OSError if it cannot be created.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME")
    folder = ((Path(cache_home) if cache_home else Path.home() / ".cache") / "quintet").resolve()
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            # independent of the umask: this function does not reject its own folders later
            path.mkdir(mode=0o700, exist_ok=True)
    home = Path(os.path.expanduser("~")).resolve()
    refuse_foreign(folder)
    for parent in folder.parents:
        _refuse(parent, "make it your own with chown and chmod go-w", is_above=True)
        if parent == home:
            break
    return folder


def refuse_foreign(path: Path) -> None:
    """Raise UserError unless `path` belongs to the user or root, and no other user can write to it."""
    _refuse(path, "remove it, and it is made again", is_above=False)


def is_private(group: int) -> bool:
    """Return whether the user is the only member of a group: the group of the user's own name, or root's group in a
    container."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:  # a user without an entry, as in a container
        return group == 0
    return entry.gr_name == user.pw_name != "root" and set(entry.gr_mem) <= {user.pw_name}


def _refuse(path: Path, remedy: str, is_above: bool) -> None:
    """`is_above`: `path` is a parent folder. A group with no other members may write to it. A parent with the sticky
    bit, such as /tmp, may be writable by all users, because they cannot move or remove the files of other users there."""
    status = path.stat()
    writers = stat.S_IWOTH if is_above and is_private(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    is_open = status.st_mode & writers and not (is_above and status.st_mode & stat.S_ISVTX)
    if status.st_uid in (os.geteuid(), 0) and not is_open:
        return
    reason = "can be written by other users" if is_open else f"belongs to another user (number {status.st_uid})"
    raise UserError(
        f"{path} {reason}, so compiled kernels from there could be theirs and are not loaded: {remedy}, "
        "or name a folder of your own in the environment variable XDG_CACHE_HOME"
    )


def remove_abandoned(folder: Path) -> None:
    """Remove the leftovers of killed compilations in `folder` that are too old to belong to a running process."""
    for leftover in folder.glob("tmp*"):
        try:
            if time.time() - leftover.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(leftover)
        except OSError:  # another process removed it, or it cannot be removed: the next compilation tries again
            continue
