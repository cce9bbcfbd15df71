"""A rank whose step must run at the same time as a later step of the previous stage: `python -m
tests.helpers.meeting_worker FD PARENT`.

It replaces the ranks' worker. The environment variable MEETING is the path of the socket on which rank 0's process
listens.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

NUM_MEETINGS = 8
TIMEOUT_S = 60.0  # for work of milliseconds; if stages wait for each other, the other side never comes


class Meetings:
    """One side. Within each step after the first `skipped` ones, it waits until the other side is within a step too."""

    def __init__(self, stream: socket.socket, skipped: int) -> None:
        self.stream, self.skipped = stream, skipped
        stream.settimeout(TIMEOUT_S)
        self.intervals: list[tuple[float, float]] = []
        """When each step began and ended."""

    def around(self, run_layers: Callable[..., Any]) -> Callable[..., Any]:
        def met(*arguments: Any) -> Any:
            start = time.monotonic()
            if 0 <= len(self.intervals) - self.skipped < NUM_MEETINGS:
                self.stream.sendall(b".")
                assert self.stream.recv(1) == b"."
            result = run_layers(*arguments)
            self.intervals.append((start, time.monotonic()))
            return result

        return met


def meet(patch: pytest.MonkeyPatch, meetings: Meetings) -> None:
    """Make this process's steps wait for the other process's steps."""
    from models.causal_lm import CausalLM

    patch.setattr(CausalLM, "run_layers", meetings.around(CausalLM.run_layers))


def record_nothing(patch: pytest.MonkeyPatch) -> None:
    """Disable recording, so that every step calls each layer."""
    from pipelines.engine import executor

    patch.setattr(executor, "MAX_RECORDED_TOKENS", 0)


def main() -> None:
    from pipelines.loading import worker

    with socket.socket(socket.AF_UNIX) as stream, pytest.MonkeyPatch.context() as patch:
        stream.connect(os.environ["MEETING"])
        meetings = Meetings(stream, skipped=0)
        record_nothing(patch)
        meet(patch, meetings)
        worker.main()
        stream.sendall(json.dumps(meetings.intervals[:NUM_MEETINGS]).encode())


if __name__ == "__main__":
    main()
