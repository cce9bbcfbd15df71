"""Token ids to text, piece by piece: no half characters, no half stop strings, nothing decoded twice over."""

import copy
from collections.abc import Callable

REPLACEMENT = "\ufffd"  # what a decoder puts for bytes that are no whole character yet
FIRST_TAIL = 8  # prompt tokens decoded as context for the first new one


class Detokenizer:
    """Turns one sequence's new tokens into text. The pieces joined are the text that decoding everything at once would give.

    A token's text can depend on the token before it (a leading space) and on those after it (bytes of one character). So each
    step decodes a short window that starts at the last token whose text was complete, and holds back what is not certain yet.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: list[int],
        stop: tuple[str, ...],
        include_stop: bool = False,
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._include_stop = include_stop
        self._window = _clean_tail(decode, prompt_token_ids)
        self._window_text = decode(self._window).rstrip(REPLACEMENT)
        self._num_known = len(self._window)  # tokens of the window whose text is in _window_text
        self._held = ""  # text that may be the start of a stop string
        self.text = ""  # all that was released

    def copy(self) -> "Detokenizer":
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def add(self, token_id: int, may_stop: bool) -> tuple[str, bool]:
        """The text that `token_id` makes certain, and whether a stop string was met. `may_stop` is False before min_new_tokens."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._window_text):
            return "", False
        piece = text[len(self._window_text) :]
        self._window = self._window[self._num_known :]
        self._window_text = self._decode(self._window)
        self._num_known = len(self._window)
        return self._release(piece, may_stop)

    def flush(self) -> str:
        """The rest, at the end of the sequence: held text, and bytes that never became a character."""
        rest = self._held + self._decode(self._window)[len(self._window_text) :]
        self._held = ""
        self.text += rest
        return rest

    def _release(self, piece: str, may_stop: bool) -> tuple[str, bool]:
        text, self._held = self._held + piece, ""
        stopped = False
        if may_stop and self._stop:
            # (end, start): the stop string that is complete first wins, however the text was cut into tokens
            found = min(
                ((start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0), default=None
            )
            stopped = found is not None
            cut = found[not self._include_stop] if found else len(text) - _overlap(text, self._stop)
            text, self._held = text[:cut], "" if stopped else text[cut:]
        self.text += text
        return text, stopped


def _clean_tail(decode: Callable[[list[int]], str], token_ids: list[int]) -> list[int]:
    """The last tokens of the prompt, from where a character begins."""
    count = FIRST_TAIL
    while count < len(token_ids) and decode(token_ids[-count:]).startswith(REPLACEMENT):
        count *= 2
    return token_ids[-count:]


def _overlap(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    longest = min(len(text), max(map(len, stops)) - 1)
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
