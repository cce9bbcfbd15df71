"""Requests that may have ended the engine's process, and are not run for ever."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from pipelines.engine_process.frames import Submit, SubmitPooled

MAX_CRASHES = 2  # that a request may have been in
FORGOTTEN_S = 3600.0  # after the last crash: it may have been another request's
MAX_SUSPECTS = 4096


class Suspects:
    """Counts in how many crashes a request was, by its digest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._crashes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # how many, and the time of the last

    def crashed(self, submits: Iterable[Submit | SubmitPooled]) -> None:
        """Count a crash that these requests were in, each once, however often it was sent."""
        self._forget()
        for digest in dict.fromkeys(map(digest_of, submits)):
            num_crashes, _ = self._crashes.pop(digest, (0, 0.0))
            self._crashes[digest] = num_crashes + 1, self._clock()
        while len(self._crashes) > MAX_SUSPECTS:
            self._crashes.popitem(last=False)

    def cleared(self, submit: Submit | SubmitPooled) -> None:
        """Forget a request that has ended well."""
        if self._crashes:
            self._crashes.pop(digest_of(submit), None)

    def has(self, submit: Submit | SubmitPooled) -> bool:
        """Return whether a request is not to be run again."""
        self._forget()
        return bool(self._crashes) and self._crashes.get(digest_of(submit), (0, 0.0))[0] >= MAX_CRASHES

    def _forget(self) -> None:
        while self._crashes:
            digest, (_, last_s) = next(iter(self._crashes.items()))
            if self._clock() - last_s < FORGOTTEN_S:
                return
            del self._crashes[digest]


def digest_of(submit: Submit | SubmitPooled) -> bytes:
    """Return what two sendings of the same request have in common: all but the seed, which is drawn where none is given."""
    settings = submit.decode if isinstance(submit, Submit) else {"cache_salt": submit.cache_salt}
    options = {name: value for name, value in settings.items() if name != "seed"}
    named = submit.adapter, submit.prefix
    content = msgspec.msgpack.encode((submit.prompt_token_ids, options, *named), order="deterministic")
    return hashlib.sha256(content).digest()
