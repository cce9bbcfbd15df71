"""Queue of requests that have reached the engine's process and are not yet checked, in arrival order."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from pipelines.replicas.engine_process.frames import Submit, SubmitPooled

TURN_S = 0.02  # time limit for checking requests before the next step; a long prompt takes about 1 ms
PATIENCE_S = 0.002  # maximum wait for preparations before the next step; settings that were used before need less
SLOW = ("guide", "bad_words")  # settings whose preparation may take a second


class Inbox:
    """Yields as many requests as fit in TURN_S. A thread prepares slow settings in the meantime."""

    def __init__(self, prepare: Callable[[Submit], None], wake: Callable[[], None], clock: Callable[[], float]) -> None:
        """Exceptions of `prepare` are ignored. `wake` is called when a preparation ends. `clock` returns seconds."""
        self._prepare, self._wake, self._clock = prepare, wake, clock
        self._frames: dict[int, Submit | SubmitPooled] = {}
        self._preparing: dict[int, Future[None]] = {}
        self._new: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, "prepare")

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def is_ready(self) -> bool:
        """Whether `take` has a request to yield."""
        return any(map(self._is_ready, self._frames))

    def put(self, frame: Submit | SubmitPooled) -> bool:
        """Add a request. Return whether a thread now prepares its settings."""
        self._frames[frame.id] = frame
        if not isinstance(frame, Submit) or not any(frame.decode.get(name) for name in SLOW):
            return False
        future = self._preparing[frame.id] = self._thread.submit(self._prepare, frame)
        future.add_done_callback(lambda _: self._wake())
        self._new.append(future)
        return True

    def drop(self, id: int) -> bool:
        """Forget a request. Return whether it was queued here."""
        if (future := self._preparing.pop(id, None)) is not None:
            future.cancel()
        return self._frames.pop(id, None) is not None

    def take(self) -> Iterator[Submit | SubmitPooled]:
        """Yield the requests that are ready, for at most TURN_S but at least one."""
        if not self._frames:  # the usual case
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
        """Stop the thread after its current preparation."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_ready(self, id: int) -> bool:
        return id not in self._preparing or self._preparing[id].done()
