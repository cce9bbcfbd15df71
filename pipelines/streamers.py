"""Text while it is generated. The pieces of a row, joined, are exactly the text that the call returns for it."""

import queue
import sys
from typing import Any, Protocol, Self, TextIO

from conf.errors import UserError
from conf.terminal import escape_control_chars


class Streamer(Protocol):
    """The receiver of texts that the pipeline calls while it generates.

    A row is one text of the results, in their order: with `n` samples, n for each prompt.

    The pipeline waits for each call, so none may wait for another call of the pipeline, whose turn comes when this one ends. The pipeline
    refuses that, but a call from another thread looks like any that takes turns.
    """

    skip_prompt: bool

    def start(self, num_rows: int) -> None:
        """Begin a call of the pipeline."""

    def put(self, row: int, text: str) -> None:
        """Take the next piece of a row."""

    def end_row(self, row: int) -> None:
        """End a row, which is complete."""

    def end(self, error: BaseException | None) -> None:
        """End the call; `error` is what it raised."""


class TextStreamer:
    """Prints the text as it comes. Of several rows each is printed whole and in order, while the next ones wait.

    On a terminal control characters are shown as their escapes; a file or a pipe gets the text as it is.
    """

    def __init__(
        self, tokenizer: object = None, skip_prompt: bool = False, file: TextIO | None = None, **decoding: Any
    ) -> None:
        """`tokenizer` is taken so that code for transformers or MindFormers runs as it is; the engine's text needs no decoding.

        So is skip_special_tokens=True. Raises UserError for other arguments of decoding.
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
            is_terminal = getattr(stream, "isatty", lambda: False)()  # a writer of the caller's own may have none
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
        """Do nothing: every piece was printed when it came."""


class StreamerTimeout(TimeoutError, queue.Empty):
    """Raised where no piece came in time. Also a queue.Empty, which is what transformers raises."""


class TextIteratorStreamer:
    """An iterator over the pieces, for a consumer in another thread than the pipeline's call.

    One text: its pieces. Several prompts or samples: pairs (row, piece). At the end StopIteration; an exception of the call is raised
    here too. The queue is unbounded, so a consumer that walks away blocks nobody. One streamer serves one call.
    """

    def __init__(
        self, tokenizer: object = None, skip_prompt: bool = False, timeout: float | None = None, **decoding: Any
    ) -> None:
        """`timeout`: most seconds to wait for one piece. For the others see TextStreamer."""
        _check_decoding(decoding)
        self.skip_prompt = skip_prompt
        self._timeout = timeout
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._keyed = False
        self._served = False  # the one call has ended, as the producer sees it
        self._over = False  # as the consumer sees it

    def start(self, num_rows: int) -> None:
        if self._served:
            raise UserError("this TextIteratorStreamer has served a call already: make a new one for each call")
        self._keyed = num_rows > 1

    def put(self, row: int, text: str) -> None:
        self._queue.put((row, text) if self._keyed else text)

    def end_row(self, row: int) -> None:
        """Do nothing: a piece says of which row it is."""

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
    """Raise UserError for arguments of decoding, which the call has."""
    for name, value in arguments.items():
        if (name, value) != ("skip_special_tokens", True):
            raise UserError(f"{name}={value!r} is not taken by a streamer: give skip_special_tokens=False to the call")
