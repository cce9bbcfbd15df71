"""Requests that have come to the engine's process and were not looked at yet, in their order."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from pipelines.engine_process.frames import Submit, SubmitPooled

TURN_S = 0.02  # that requests are looked at before the next step: a long prompt takes a millisecond
PATIENCE_S = 0.002  # for what is prepared, before the next step: settings that were used before are there by then
SLOW = ("guide", "bad_words")  # settings whose preparation may take a second


class Inbox:
    """Hands out as many requests as a turn has time for. Settings that take long are prepared in a thread meanwhile."""

    def __init__(self, prepare: Callable[[Submit], None], wake: Callable[[], None], clock: Callable[[], float]) -> None:
        """`prepare`: what it raises is lost. `wake` is called when something was prepared. `clock`: returns seconds."""
        self._prepare, self._wake, self._clock = prepare, wake, clock
        self._frames: dict[int, Submit | SubmitPooled] = {}
        self._preparing: dict[int, Future[None]] = {}
        self._new: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, "prepare")

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def is_ready(self) -> bool:
        """Whether `take` has something."""
        return any(map(self._is_ready, self._frames))

    def put(self, frame: Submit | SubmitPooled) -> bool:
        """Take a request. Returns whether it is prepared from here on."""
        self._frames[frame.id] = frame
        if not isinstance(frame, Submit) or not any(frame.decode.get(name) for name in SLOW):
            return False
        future = self._preparing[frame.id] = self._thread.submit(self._prepare, frame)
        future.add_done_callback(lambda _: self._wake())
        self._new.append(future)
        return True

    def drop(self, id: int) -> bool:
        """Forget a request. Returns whether it was here."""
        if (future := self._preparing.pop(id, None)) is not None:
            future.cancel()
        return self._frames.pop(id, None) is not None

    def take(self) -> Iterator[Submit | SubmitPooled]:
        """Yield the requests whose turn has come, one at least if there is one."""
        if not self._frames:  # as in most steps
            return
        wait(self._new, PATIENCE_S)
        self._new.clear()
        end_s = self._clock() + TURN_S
        for id in [id for id in self._frames if self._is_ready(id)]:
            self._preparing.pop(id, None)
            yield self._frames.pop(id)
            if self._clock() >= end_s:
                return

    def close(self) -> None:
        """End the thread after what it does now."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_ready(self, id: int) -> bool:
        return id not in self._preparing or self._preparing[id].done()
