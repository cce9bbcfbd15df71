"""The folder of compiled kernels. Their code runs as the user, so nobody else but root may own or change what is in it."""

import grp
import os
import pwd
import shutil
import stat
import time
from pathlib import Path

from conf.errors import UserError

ABANDONED_AFTER_S = 24 * 60 * 60  # a compilation takes a minute or two


def cache_folder() -> Path:
    """Return the folder, without symbolic links in its path, made where it is missing.

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
        _refuse(parent, "make it your own with chown and chmod go-w", is_above=True)
        if parent == home:
            break
    return folder


def refuse_foreign(path: Path) -> None:
    """Raises UserError unless `path` is the user's own or root's, and nobody else can write to it."""
    _refuse(path, "remove it, and it is made anew", is_above=False)


def is_private(group: int) -> bool:
    """Return whether nobody but the user is in a group: one of the user's own name, or in a container root's."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:  # a user by number alone, as in a container
        return group == 0
    return entry.gr_name == user.pw_name != "root" and set(entry.gr_mem) <= {user.pw_name}


def _refuse(path: Path, remedy: str, is_above: bool) -> None:
    """`is_above`: a folder of the path, which a group of the user alone may write to. In one like /tmp everybody may, but nobody may
    move or remove what is another's."""
    found = path.stat()
    writers = stat.S_IWOTH if is_above and is_private(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    is_open = found.st_mode & writers and not (is_above and found.st_mode & stat.S_ISVTX)
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
