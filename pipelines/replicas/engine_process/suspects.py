"""Requests that may have crashed the engine's process. After MAX_CRASHES crashes a request is rejected."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from pipelines.replicas.engine_process.frames import Submit, SubmitPooled

MAX_CRASHES = 2  # number of crashes after which a request is rejected
# A suspect is forgotten this long after its last crash, because another request may have caused the crash.
FORGOTTEN_S = 3600.0
MAX_SUSPECTS = 4096


class Suspects:
    """Counts, by the request's digest, the crashes at which each request was in progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        # number of crashes, time of the last crash
        self._crashes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def crashed(self, submits: Iterable[Submit | SubmitPooled]) -> None:
        """Count a crash for each of these requests. Copies of the same request count once."""
        self._forget()
        for digest in dict.fromkeys(map(digest_of, submits)):
            num_crashes, _ = self._crashes.pop(digest, (0, 0.0))
            self._crashes[digest] = num_crashes + 1, self._clock()
        while len(self._crashes) > MAX_SUSPECTS:
            self._crashes.popitem(last=False)

    def cleared(self, submit: Submit | SubmitPooled) -> None:
        """Forget a request that has succeeded."""
        if self._crashes:
            self._crashes.pop(digest_of(submit), None)

    def has(self, submit: Submit | SubmitPooled) -> bool:
        """Return whether a request must be rejected."""
        self._forget()
        return bool(self._crashes) and self._crashes.get(digest_of(submit), (0, 0.0))[0] >= MAX_CRASHES

    def _forget(self) -> None:
        while self._crashes:
            digest, (_, last_s) = next(iter(self._crashes.items()))
            if self._clock() - last_s < FORGOTTEN_S:
                return
            del self._crashes[digest]


def digest_of(submit: Submit | SubmitPooled) -> bytes:
    """Return a digest that is equal for repeated submissions of a request. The seed is excluded: it may be random."""
    settings = submit.decode if isinstance(submit, Submit) else {"cache_salt": submit.cache_salt}
    options = {name: value for name, value in settings.items() if name != "seed"}
    content = msgspec.msgpack.encode(
        (submit.prompt_token_ids, options, submit.adapter, submit.prefix), order="deterministic"
    )
    return hashlib.sha256(content).digest()
