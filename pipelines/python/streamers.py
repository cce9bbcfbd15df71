"""Stream text while it is generated.

The concatenated pieces of a row are exactly the text that the call returns for it.
"""

import queue
import sys
from typing import Any, Protocol, Self, TextIO

from conf.errors import UserError
from conf.support.terminal import escape_control_chars


class Streamer(Protocol):
    """Receives text from a pipeline call while it generates.

    A row is one text of the results, in their order: with `n` samples, a prompt has n rows. The pipeline waits for each
    method. A method must not call the same pipeline and wait for the result, because the new call starts only after the
    current call ends. In the thread of the current call this raises UserError; in another thread the deadlock is not
    detected.
    """

    skip_prompt: bool

    def start(self, num_rows: int) -> None:
        """Begin a call of the pipeline."""

    def put(self, row: int, text: str) -> None:
        """Take the next piece of a row."""

    def end_row(self, row: int) -> None:
        """End a row, which is complete."""

    def end(self, error: BaseException | None) -> None:
        """End the call. `error`: the exception that it raised."""


class TextStreamer:
    """Prints text as it is generated. Several rows are printed one after another, each whole; later rows are buffered.

    A terminal gets control characters as escapes; a file or a pipe gets the raw text.
    """

    def __init__(
        self, tokenizer: object = None, skip_prompt: bool = False, file: TextIO | None = None, **decoding: Any
    ) -> None:
        """`tokenizer` and skip_special_tokens=True are accepted for compatibility with transformers and MindFormers.

        Raises UserError for other decoding arguments.
        """
        _check_decoding(decoding)
        self.skip_prompt = skip_prompt
        self._file = file

    def start(self, num_rows: int) -> None:
        self._current = 0
        self._waiting: dict[int, str] = dict.fromkeys(range(num_rows), "")
        self._complete: set[int] = set()

    def put(self, row: int, text: str) -> None:
        if row == self._current:
            stream = self._file or sys.stdout
            is_terminal = getattr(stream, "isatty", lambda: False)()  # the caller's stream may have no isatty
            print(escape_control_chars(text) if is_terminal else text, end="", file=stream, flush=True)
        else:
            self._waiting[row] += text

    def end_row(self, row: int) -> None:
        self._complete.add(row)
        while self._current in self._complete:
            print(file=self._file or sys.stdout, flush=True)
            self._current += 1
            self.put(self._current, self._waiting.pop(self._current, ""))

    def end(self, error: BaseException | None) -> None:
        """Do nothing: every piece has been printed."""


class StreamerTimeout(TimeoutError, queue.Empty):
    """Raised if no piece arrives in time. Also a queue.Empty, which transformers raises."""


class TextIteratorStreamer:
    """An iterator over the pieces, for a consumer in another thread than the pipeline's call.

    Yields pieces of one text, or pairs (row, piece) for several prompts or samples. An exception of the call is raised
    here, too. The queue is unbounded, so a consumer that stops reading blocks nothing. A streamer serves one call.
    """

    def __init__(
        self, tokenizer: object = None, skip_prompt: bool = False, timeout: float | None = None, **decoding: Any
    ) -> None:
        """`timeout`: seconds to wait for one piece. The other arguments are the same as in TextStreamer."""
        _check_decoding(decoding)
        self.skip_prompt = skip_prompt
        self._timeout = timeout
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._keyed = False
        self._served = False  # the call has ended, set by the producer
        self._over = False  # the end was read, set by the consumer

    def start(self, num_rows: int) -> None:
        if self._served:
            raise UserError("this TextIteratorStreamer has served a call already: make a new one for each call")
        self._keyed = num_rows > 1

    def put(self, row: int, text: str) -> None:
        self._queue.put((row, text) if self._keyed else text)

    def end_row(self, row: int) -> None:
        """Do nothing: a piece includes its row."""

    def end(self, error: BaseException | None) -> None:
        self._served = True
        self._queue.put(error if error is not None else StopIteration())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            item = self._queue.get(timeout=self._timeout)
        except queue.Empty:
            raise StreamerTimeout(f"no text for {self._timeout} seconds") from None
        if isinstance(item, BaseException):
            self._over = True
            raise item
        return item


def _check_decoding(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if (name, value) != ("skip_special_tokens", True):
            raise UserError(f"{name}={value!r} is not taken by a streamer: give skip_special_tokens=False to the call")
