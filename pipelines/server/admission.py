"""Admission control: bounds the waiting requests, estimates the wait, and says when a rejected client may retry."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from conf.serving import ServeConfig
from pipelines.replicas.engine_process.client import RemoteEngine
from pipelines.replicas.engine_process.frames import Beat
from pipelines.server.api.errors import ApiError

MAX_RETRY_S = 60
WINDOW_S = 30.0  # window of the throughput average, in seconds


@dataclass(eq=False)
class WaitingPrompt:
    """A prompt that was sent to the engine and has no output yet."""

    num_tokens: int
    beat: Beat | None
    """The last Beat frame that arrived before this prompt was sent."""


class Speed:
    """Measures the prefill throughput, in prompt tokens per second, while prompts wait."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._num_tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first measurement."""
        return self._num_tokens / self._seconds if self._num_tokens > 0 else None

    def note(self, now: float, num_tokens: int, is_busy: bool) -> None:
        """Record `num_tokens`, the prompt tokens computed so far. `is_busy`: whether prompts wait from now on."""
        if self._last is not None:
            seconds, tokens = now - self._last[0], num_tokens - self._last[1]
            if tokens >= 0:  # the count restarts with a new child process
                self._seconds += seconds
                self._num_tokens += tokens
        if self._seconds > WINDOW_S:
            self._seconds, self._num_tokens = self._seconds / 2, self._num_tokens / 2
        self._last = (now, num_tokens) if is_busy else None


class Admission:
    """Counts waiting requests. Rejects excess requests with status 429 and a retry-after time."""

    def __init__(
        self,
        engine: RemoteEngine,
        config: ServeConfig,
        refused: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`refused` is called with the reason of each rejection."""
        self._engine = engine
        self.max_sequences = config.replicas * config.batch_size + config.max_waiting
        """The most sequences that run and wait."""
        self._max_tokens = config.max_waiting_tokens
        self._refused = refused
        self._now = now
        self._num_sequences = 0
        self._prompts: dict[WaitingPrompt, None] = {}  # in arrival order
        self._speed = Speed()

    @contextmanager
    def place(self, num_sequences: int, timeout_s: float) -> Iterator[None]:
        """Reserve capacity for the sequences of a request within the block. Called before tokenization.

        Raises ApiError: 429 if the server is full, 400 if the request can never fit.
        """
        if num_sequences > self.max_sequences:
            limit = f"serve.batch_size and serve.max_waiting allow {self.max_sequences}"
            raise ApiError(400, f"the request has {num_sequences} sequences, but {limit}: send it in parts", param="n")
        self._note()
        if self._num_sequences + num_sequences > self.max_sequences:
            raise self._full("sequences", f"{self._num_sequences} sequences run or wait")
        self.check(1)  # a request has at least one token
        if (wait := self._wait_s()) is not None and wait > timeout_s:
            raise self._full(
                "deadline", f"the wait is about {wait:.0f} s, longer than the request's time limit of {timeout_s:g} s"
            )
        self._num_sequences += num_sequences
        try:
            yield
        finally:
            self._num_sequences -= num_sequences

    def check(self, num_tokens: int) -> None:
        """Raise ApiError (429) if the prompts of a request exceed the limit together with the waiting prompts.

        If no prompt waits, prompts of any size are admitted.
        """
        waiting = self.num_waiting_tokens
        if waiting and waiting + num_tokens > self._max_tokens:
            raise self._full("tokens", f"prompts of {waiting} tokens wait")

    def wait(self, num_tokens: int) -> WaitingPrompt:
        """Count a prompt as waiting from now until `begun`. Called when the prompt is sent to the engine."""
        prompt = WaitingPrompt(num_tokens, self._engine.beat)
        self._prompts[prompt] = None
        self._note()
        return prompt

    def begun(self, prompt: WaitingPrompt) -> None:
        """Stop counting a prompt as waiting. Does nothing if it is not counted."""
        if self._prompts.pop(prompt, 0) is None:
            self._note()

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens of the waiting prompts.

        Counts all prompts sent since the last Beat frame. The frame says that `num_waiting` earlier prompts still
        wait, so the latest `num_waiting` earlier prompts also count.
        """
        beat = self._engine.beat
        old = [prompt.num_tokens for prompt in self._prompts if prompt.beat is not beat]
        new = sum(prompt.num_tokens for prompt in self._prompts if prompt.beat is beat)
        return new + sum(old[-beat.num_waiting :] if beat and beat.num_waiting else ())

    def _note(self) -> None:
        if beat := self._engine.beat:
            self._speed.note(self._now(), beat.num_prompt_tokens, bool(self._prompts))

    def _wait_s(self) -> float | None:
        """Estimate the seconds until the engine begins the last waiting prompt; None without a measured throughput."""
        speed = self._speed.tokens_per_s
        return self.num_waiting_tokens / speed if speed else None

    def _full(self, reason: str, cause: str) -> ApiError:
        self._refused(reason)
        seconds = min(max(math.ceil(self._wait_s() or 1.0), 1), MAX_RETRY_S)
        message = f"{cause}: send the request again after {seconds} s"
        return ApiError(429, message, "rate_limit_error", code="queue_full", headers={"retry-after": str(seconds)})
