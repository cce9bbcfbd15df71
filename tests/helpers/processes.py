"""Processes of this machine, read from /proc."""

import os
from contextlib import suppress
from pathlib import Path


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the command of each process of this machine."""
    known = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            known[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1]), command
    return known


def ours() -> dict[int, tuple[int, str]]:
    """Return the processes that this process has started, and their descendants."""
    known = processes()

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in known and is_ours(known[pid][0]))

    return {pid: process for pid, process in known.items() if is_ours(pid)}


def engines() -> dict[int, int]:
    """Return the processes of our engines, with their workers."""
    return {pid: parent for pid, (parent, command) in ours().items() if "pipelines.replicas.engine_process" in command}


def row_workers() -> list[int]:
    """Return the processes of our Ray that run rows."""
    return [pid for pid, (_, command) in ours().items() if command.startswith("ray::RowWorker")]
