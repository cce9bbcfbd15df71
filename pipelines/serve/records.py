"""What is known of each request when it has been answered, and requests.jsonl, which keeps it. No texts."""

import json
import logging
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass
class Record:
    """A request, from its head to the end of its answer."""

    id: str
    method: str
    path: str
    key: str | None = None
    """Name of the key."""
    model: str | None = None
    batch: str | None = None
    """Id of the batch that the request is a line of. It waits for all others, without a limit of its own."""
    status: int | None = None
    """None where the client left before there was an answer."""
    began: float = field(default_factory=time.time)
    """Seconds since 1970."""
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    finish: list[str] = field(default_factory=list)
    """Of each sample, or how the request ended before."""
    seed: int | None = None
    client: dict[str, Any] | None = None
    """What the client says of itself: user, metadata, safety_identifier, prompt_cache_key."""


class RequestLog:
    """The file requests.jsonl. Raises OSError where it cannot be made; a line that cannot be written later is lost with a warning."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._has_failed = False

    def write(self, record: Record) -> None:
        """Append a line."""
        try:
            os.write(self._file, json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n")
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("requests.jsonl cannot be written (%s): its lines are lost", error.strerror)
            self._has_failed = True

    def close(self) -> None:
        os.close(self._file)
