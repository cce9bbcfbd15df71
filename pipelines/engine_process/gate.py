"""What streams have said, held back until it may be sent: a bounded number of chunks a second, however many streams there are."""

import time
from collections.abc import Callable

from pipelines.engine_process.frames import Delta, Logprob

MAX_CHUNKS_PER_S = 1000  # of all streams together: each takes the HTTP process some 100 us, and a client as much
PAUSE_S = 0.0015  # between two chunks of a stream: nobody reads faster


class Gate:
    """Holds deltas of streams, those of a sample merged into one.

    It opens as often as each stream may have a chunk, but not without a pause. A sample's first tokens and its end do not wait.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._held: dict[tuple[int, int], Delta] = {}  # by request and sample
        self._begun: set[tuple[int, int]] = set()  # samples that have been let through, and go on
        self._urgent: set[tuple[int, int]] = set()
        self._opened_s = clock()

    def put(self, id: int, sample: int, token_ids: list[int], text: str, logprobs: list[Logprob]) -> None:
        """Take the next tokens of a sample, and the text that they made certain."""
        delta = self._delta(id, sample)
        delta.text += text
        delta.token_ids += token_ids
        delta.logprobs += logprobs
        if (id, sample) not in self._begun:
            self._urgent.add((id, sample))

    def end(self, id: int, sample: int, finish_reason: str, stop_reason: str | int | None) -> None:
        """Take the end of a sample, after all of its tokens."""
        delta = self._delta(id, sample)
        delta.finish_reason, delta.stop_reason = finish_reason, stop_reason
        self._urgent.add((id, sample))

    def drop(self, id: int) -> None:
        """Forget a request."""
        self._held = {key: delta for key, delta in self._held.items() if key[0] != id}
        self._begun = {key for key in self._begun if key[0] != id}
        self._urgent = {key for key in self._urgent if key[0] != id}

    def take(self) -> list[Delta]:
        """Return the deltas that may be sent now, which are the caller's."""
        now = self._clock()
        if now - self._opened_s >= max(PAUSE_S, len(self._begun) / MAX_CHUNKS_PER_S):
            self._opened_s = now
            taken, self._held = self._held, {}
        else:
            taken = {key: self._held.pop(key) for key in sorted(self._urgent)}
        self._urgent.clear()
        for key, delta in taken.items():
            if delta.finish_reason:
                self._begun.discard(key)
            else:
                self._begun.add(key)
        return list(taken.values())

    def _delta(self, id: int, sample: int) -> Delta:
        if (delta := self._held.get((id, sample))) is None:
            delta = self._held[id, sample] = Delta(id, sample, "", [], [])
        return delta
