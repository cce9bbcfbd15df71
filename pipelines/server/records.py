"""The record of each answered request, and the log requests.jsonl, which contains no prompts or generated text."""

import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipelines.server.api.traced_texts import TracedTexts

log = logging.getLogger(__name__)


@dataclass
class Record:
    """A request from its head to the end of its response."""

    id: str
    method: str
    path: str
    key: str | None = None
    """Name of the API key."""
    model: str | None = None
    batch: str | None = None
    """Id of the batch, if the request is a line of a batch.

    A batch line yields to all other requests and has no time limit.
    """
    status: int | None = None
    """None if the client disconnected before the response began."""
    began: float = field(default_factory=time.time)
    """Start time in seconds since 1970."""
    submitted_s: float | None = None
    """Time until the first prompt was sent to the engine. The next three times begin there."""
    queue_s: float | None = None
    first_token_s: float | None = None
    engine_s: float | None = None
    """Time until the engine had finished the prompt."""
    total_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    finish: list[str] = field(default_factory=list)
    """Finish reason of each sample, or the reason of an early end."""
    seed: int | None = None
    warnings: list[str] = field(default_factory=list)
    """Parts of the request that have no effect."""
    answer_id: str | None = None
    settings: dict[str, Any] | None = None
    """Settings of the request in SETTINGS, by name."""
    trace_context: dict[str, str] = field(default_factory=dict)
    """The headers traceparent and tracestate of the client (W3C Trace Context)."""
    client: dict[str, Any] | None = None
    """Client identification from the body: user, metadata, safety_identifier, prompt_cache_key."""
    texts: TracedTexts | None = None
    """The texts for the trace. None without serve.trace_texts."""

    def collect_texts(self) -> None:
        self.texts = TracedTexts()


class RecordLog(Protocol):
    """Receives the record of each completed request."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class RequestLog:
    """The file requests.jsonl. Raises OSError if it cannot be created. Later write errors only log a warning."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._has_failed = False

    def write(self, record: Record) -> None:
        try:
            values = {name: value for name, value in vars(record).items() if name != "texts"}
            os.write(self._file, json.dumps(values, separators=(",", ":")).encode() + b"\n")
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("requests.jsonl cannot be written (%s): the records of requests are lost", error.strerror)
            self._has_failed = True

    def close(self) -> None:
        os.close(self._file)
