"""Wait for a condition, up to a limit."""

import time
from collections.abc import Callable

LIMIT_S = 120.0  # for work that takes a second or two on an idle machine


def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds` returns true. Fails after LIMIT_S."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
