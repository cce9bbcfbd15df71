"""The engine's side of the socket without a process: it receives a script of frames and records the frames that it
sends."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from pipelines.replicas.engine_process.frames import Deltas, ToEngine
from pipelines.replicas.engine_process.loading import Served
from pipelines.replicas.engine_process.process import EngineProcess
from tests.helpers.serving import Sample
from tests.helpers.waiting import LIMIT_S


class Script:
    """A channel with scripted frames. The frames of each turn arrive before the next step. It closes after the last
    turn."""

    is_closed = False

    def __init__(self, *turns: list[ToEngine] | Callable[[], None]) -> None:
        """An element of a turn may also be a function to call."""
        self._turns = deque(turns)
        self.sent: list[Any] = []
        self.is_blocked = False
        self.awaits_wake: Callable[[], bool] = lambda: False
        """Whether `wake` will be called."""
        self._woken = threading.Event()

    def wake(self) -> None:
        self._woken.set()

    def send(self, frame: Any) -> None:
        self.sent.append(frame)

    def receive(self, waits: bool) -> list[ToEngine] | None:
        if not self._turns and waits and self.awaits_wake():
            assert self._woken.wait(LIMIT_S)
            self._woken.clear()
            return []
        if not self._turns:
            return None if waits and not self.is_blocked else []
        turn = self._turns.popleft()
        if isinstance(turn, list):
            return turn
        turn()
        return []

    def of(self, kind: type, id: int | None = None) -> list[Any]:
        return [frame for frame in self.sent if isinstance(frame, kind) and id in (None, getattr(frame, "id", None))]

    def samples(self, id: int) -> list[Sample]:
        """Return the joined deltas of a request, by sample."""
        samples: dict[int, Sample] = {}
        for delta in (delta for frame in self.of(Deltas) for delta in frame.deltas if delta.id == id):
            sample = samples.setdefault(delta.sample, Sample())
            assert sample.finish_reason is None
            sample.text += delta.text
            sample.token_ids += delta.token_ids
            sample.logprobs += delta.logprobs
            sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
            sample.num_deltas += 1
        return [sample for _, sample in sorted(samples.items())]


def serve(served: Served, *turns: Any, clock: Callable[[], float] | None = None, max_step_ms: float = 200.0) -> Script:
    script = Script(*turns)
    extra = {} if clock is None else {"clock": clock}
    process = EngineProcess(script, served, max_step_ms, **extra)  # type: ignore[arg-type]
    script.awaits_wake = lambda: len(process._inbox) > 0
    process.serve()
    return script
