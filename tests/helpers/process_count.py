"""Counts the processes that a run of pytest starts, its workers' included, and fails a run that starts more than it may.

For tests/conftest.py, whose hooks call `node_down` and `finish`.
"""

import sys
from collections import Counter
from typing import Any

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}  # audit events
FORKED = "fork_server.fork"  # after subprocess.Popen, where the fork server did it
counts = Counter({"started": 0, "forked": 0})


def count(event: str, arguments: tuple[object, ...]) -> None:
    if event in STARTS:
        counts["started"] += 1
    elif event == FORKED:
        counts["started"] -= 1
        counts["forked"] += 1


sys.addaudithook(count)


def node_down(node: Any) -> None:
    """Add what a worker of pytest-xdist has counted. One that crashed has said nothing."""
    counts.update(getattr(node, "workeroutput", {}).get("processes", {}))


def finish(session: pytest.Session, most: dict[str, int] | None) -> None:
    """Say the numbers, or send them to who has started this worker. `most`: numbers allowed by the names in `counts`; None: any."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["processes"] = dict(counts)
        return
    report = session.config.get_terminal_writer()
    report.line(f"\nprocesses: {counts['started']} started, {counts['forked']} forked")
    for name, number in (most or {}).items():
        if counts[name] > number:
            report.line(f"more than {number} processes were {name}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
