"""Measure rows in other processes, so that a crash, a hang or the time limit costs one row and not all rows."""

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
    """Report a row for every name, in this order.

    `command` followed by names prints a line of JSON for each name, as `measured` does. A row that exceeds its time
    limit or ends the process is reported with an `error`, and another process continues with the next row. After the
    total time limit, the remaining rows are reported as not measured.
    """
    todo = list(names)
    while todo:
        if time_left() <= 0:
            report({"name": todo.pop(0), "error": "no time was left"})
        else:
            _run([*command, *todo], todo, limit_s, time_left, report)


def measured(name: str, measure: Callable[[], Row]) -> None:
    """In the other process: print the start of a measurement, then its result or its error in one line."""
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
    """Run one process until it has measured all of `todo` or was ended. Reported rows are removed from `todo`."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    # Started: a process that cannot start also costs a row, because otherwise it would be started forever.
    started, last, begun = time.monotonic(), "", True
    while todo:
        row_s = limit_s(todo[0]) - (time.monotonic() - started)
        try:
            line = lines.get(timeout=max(0.0, min(row_s, time_left())))
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
        else:  # output of a library
            last = line.strip() or last
            print(line, end="", file=sys.stderr)
    with suppress(subprocess.TimeoutExpired):  # the system may need time to free the memory of a GPU
        process.wait(timeout=10)


def _read(process: subprocess.Popen[str], lines: "queue.Queue[str | None]") -> None:
    assert process.stdout
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
