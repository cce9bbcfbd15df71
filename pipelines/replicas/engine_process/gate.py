"""Rate limit for streamed deltas: a bounded number of chunks per second, independent of the number of streams."""

import time
from collections.abc import Callable

from pipelines.replicas.engine_process.frames import Delta, Logprob

MAX_CHUNKS_PER_S = 1000  # of all streams; a chunk costs the HTTP process about 100 us, and a client about as much
PAUSE_S = 0.0015  # minimum time between two chunks of a stream; readers do not benefit from a shorter time


class Gate:
    """Holds deltas of streams. Deltas of the same sample are merged.

    Each opening lets one chunk per stream pass. The gate opens as often as MAX_CHUNKS_PER_S allows, but at most once
    per PAUSE_S. The first tokens and the end of a sample pass at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._held: dict[tuple[int, int], Delta] = {}  # by request id and sample
        self._begun: set[tuple[int, int]] = set()  # samples that have sent a delta and have not ended
        self._urgent: set[tuple[int, int]] = set()
        self._opened_s = clock()

    def put(self, id: int, sample: int, token_ids: list[int], text: str, logprobs: list[Logprob]) -> None:
        """Add tokens of a sample and the text that they complete."""
        delta = self._delta(id, sample)
        delta.text += text
        delta.token_ids += token_ids
        delta.logprobs += logprobs
        if (id, sample) not in self._begun:
            self._urgent.add((id, sample))

    def end(self, id: int, sample: int, finish_reason: str, stop_reason: str | int | None) -> None:
        """Add the end of a sample, after all its tokens."""
        delta = self._delta(id, sample)
        delta.finish_reason, delta.stop_reason = finish_reason, stop_reason
        self._urgent.add((id, sample))

    def drop(self, id: int) -> None:
        self._held = {key: delta for key, delta in self._held.items() if key[0] != id}
        self._begun = {key for key in self._begun if key[0] != id}
        self._urgent = {key for key in self._urgent if key[0] != id}

    def take(self) -> list[Delta]:
        """Return and remove the deltas that may be sent now."""
        now = self._clock()
        if now - self._opened_s >= max(PAUSE_S, len(self._begun) / MAX_CHUNKS_PER_S):
            self._opened_s = now
            deltas, self._held = self._held, {}
        else:
            deltas = {key: self._held.pop(key) for key in sorted(self._urgent)}
        self._urgent.clear()
        for key, delta in deltas.items():
            if delta.finish_reason:
                self._begun.discard(key)
            else:
                self._begun.add(key)
        return list(deltas.values())

    def _delta(self, id: int, sample: int) -> Delta:
        if (delta := self._held.get((id, sample))) is None:
            delta = self._held[id, sample] = Delta(id, sample, "", [], [])
        return delta
