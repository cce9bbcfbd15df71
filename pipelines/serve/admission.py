"""How many requests may wait, how long they will, and when a refused one may come again."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from conf.serving import ServeConfig
from pipelines.api.errors import ApiError
from pipelines.engine_process.client import RemoteEngine
from pipelines.engine_process.frames import Beat

MAX_RETRY_S = 60
WINDOW_S = 30.0  # of which the measured speed tells, about


@dataclass(eq=False)
class WaitingPrompt:
    """A prompt that was handed to the engine and has no token yet."""

    num_tokens: int
    beat: Beat | None
    """The last one before it."""


class Speed:
    """Tokens of prompts that the engine computes in a second while some wait."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._num_tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None until something was measured."""
        return self._num_tokens / self._seconds if self._num_tokens > 0 else None

    def note(self, now: float, num_tokens: int, is_busy: bool) -> None:
        """Take the count at a moment. `is_busy`: whether prompts wait from here on."""
        if self._last is not None:
            seconds, tokens = now - self._last[0], num_tokens - self._last[1]
            if tokens >= 0:  # the count begins anew with another child
                self._seconds += seconds
                self._num_tokens += tokens
        if self._seconds > WINDOW_S:
            self._seconds, self._num_tokens = self._seconds / 2, self._num_tokens / 2
        self._last = (now, num_tokens) if is_busy else None


class Admission:
    """Counts what waits, and refuses what is too much with 429 and the time after which it may come again."""

    def __init__(
        self,
        engine: RemoteEngine,
        config: ServeConfig,
        refused: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`refused` is told the reason of each refusal."""
        self._engine = engine
        self._max_sequences = config.replicas * config.batch_size + config.max_waiting
        self._max_tokens = config.max_waiting_tokens
        self._refused = refused
        self._now = now
        self._num_sequences = 0
        self._prompts: dict[WaitingPrompt, None] = {}  # in the order in which they came
        self._speed = Speed()

    @contextmanager
    def place(self, num_sequences: int, timeout_s: float) -> Iterator[None]:
        """Hold places for the sequences of a request within the block, before its texts become tokens.

        Raises ApiError (429; 400 for more than there are at all).
        """
        if num_sequences > self._max_sequences:
            limit = f"serve.batch_size and serve.max_waiting allow {self._max_sequences}"
            raise ApiError(400, f"the request has {num_sequences} sequences, but {limit}: send it in parts", param="n")
        self._note()
        if self._num_sequences + num_sequences > self._max_sequences:
            raise self._full("sequences", f"{self._num_sequences} sequences run or wait")
        self.check(1)  # the least that a request has
        if (wait := self._wait_s()) is not None and wait > timeout_s:
            raise self._full(
                "deadline", f"the wait is about {wait:.0f} s, longer than the {timeout_s:g} s that the request has"
            )
        self._num_sequences += num_sequences
        try:
            yield
        finally:
            self._num_sequences -= num_sequences

    def check(self, num_tokens: int) -> None:
        """Raise ApiError (429) where the prompts of a request do not fit beside those that wait; alone they always do."""
        waiting = self.num_waiting_tokens
        if waiting and waiting + num_tokens > self._max_tokens:
            raise self._full("tokens", f"prompts of {waiting} tokens wait")

    def wait(self, num_tokens: int) -> WaitingPrompt:
        """Count a prompt that is handed to the engine, until `begun`."""
        prompt = WaitingPrompt(num_tokens, self._engine.beat)
        self._prompts[prompt] = None
        self._note()
        return prompt

    def begun(self, prompt: WaitingPrompt) -> None:
        """Forget a prompt that waits no longer, or that is counted no longer already."""
        if self._prompts.pop(prompt, 0) is None:
            self._note()

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the prompts that wait: those that the engine has not spoken of yet, and as many before them as it says that wait."""
        beat = self._engine.beat
        old = [prompt.num_tokens for prompt in self._prompts if prompt.beat is not beat]
        new = sum(prompt.num_tokens for prompt in self._prompts if prompt.beat is beat)
        return new + sum(old[-beat.num_waiting :] if beat and beat.num_waiting else ())

    def _note(self) -> None:
        if beat := self._engine.beat:
            self._speed.note(self._now(), beat.num_prompt_tokens, bool(self._prompts))

    def _wait_s(self) -> float | None:
        """Return about the seconds until what waits now has begun; None where no speed was measured."""
        speed = self._speed.tokens_per_s
        return self.num_waiting_tokens / speed if speed else None

    def _full(self, reason: str, what: str) -> ApiError:
        self._refused(reason)
        seconds = min(max(math.ceil(self._wait_s() or 1.0), 1), MAX_RETRY_S)
        message = f"{what}: send the request again after {seconds} s"
        return ApiError(429, message, "rate_limit_error", code="queue_full", headers={"retry-after": str(seconds)})
