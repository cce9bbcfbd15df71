"""How long a test waits for what comes soon."""

import time
from collections.abc import Callable

LIMIT_S = 120.0  # for what takes a second or two on an idle machine


def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
