"""Measures rows in other processes, so that a crash, a hang or the end of the time costs one row and not all."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Row = dict[str, Any]


def supervise(
    names: list[str],
    command: list[str],
    limit_s: Callable[[str], float],
    time_left: Callable[[], float],
    report: Callable[[Row], None],
) -> None:
    """Report a row for every name, in this order. `command` followed by names prints a line of JSON for each, as `measured` does.

    A row that takes more than its limit, or with which the process ends, is reported with an `error`; another process goes on with
    the next one. When no time is left, the rest is reported as not measured.
    """
    todo = list(names)
    while todo:
        if time_left() <= 0:
            report({"name": todo.pop(0), "error": "no time was left"})
        else:
            _run([*command, *todo], todo, limit_s, time_left, report)


def measured(name: str, measure: Callable[[], Row]) -> None:
    """In the other process: print that it begins, then what was measured, or in one line what was wrong."""
    print(json.dumps({"begins": name}), flush=True)
    try:
        row = measure()
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    print(json.dumps({"name": name, **row}), flush=True)


def _run(
    command: list[str],
    todo: list[str],
    limit_s: Callable[[str], float],
    time_left: Callable[[], float],
    report: Callable[[Row], None],
) -> None:
    """One process, until it has done all of `todo` or was ended. What is reported leaves `todo`."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    # Begun: a process that cannot start costs a row, too, or it would be started for ever.
    started, last, begun = time.monotonic(), "", True
    while todo:
        own = limit_s(todo[0]) - (time.monotonic() - started)
        try:
            line = lines.get(timeout=max(0.0, min(own, time_left())))
        except queue.Empty:
            process.kill()
            reason = "no time was left" if time_left() <= 0 else f"it took more than {limit_s(todo[0]):.0f} s"
            report({"name": todo.pop(0), "error": reason})
            break
        if line is None:
            if begun:
                report({"name": todo.pop(0), "error": f"the process ended with {process.wait()}: {last[:200]}"})
            break
        if line.startswith('{"begins": '):
            begun = True
        elif line.startswith('{"name": '):
            row: Row = json.loads(line)
            assert row["name"] == todo.pop(0)
            report(row)
            started, begun = time.monotonic(), False
        else:  # what a library prints
            last = line.strip() or last
            print(line, end="", file=sys.stderr)
    with suppress(subprocess.TimeoutExpired):  # the system may take a while to end what a GPU holds
        process.wait(timeout=10)


def _read(process: subprocess.Popen[str], lines: "queue.Queue[str | None]") -> None:
    assert process.stdout
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
