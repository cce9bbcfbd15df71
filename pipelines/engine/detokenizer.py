"""Turns token ids into text, piece by piece: no half characters, no half stop strings, nothing decoded twice over."""

import copy
from collections.abc import Callable

from pipelines.engine.stop_strings import StopStrings

REPLACEMENT = "\ufffd"  # what a decoder puts for bytes that are no whole character yet
FIRST_TAIL = 8  # prompt tokens decoded as context for the first new one
CHARACTER = 4  # bytes of the longest character, which begins at most three tokens before its last one
MAX_PENDING = 16  # tokens in a row whose text is not certain


class Detokenizer:
    """Turns one sequence's new tokens into text. The pieces joined are the text that decoding everything at once would give.

    A token's text can depend on the token before it (a leading space) and on those after it (bytes of one character). So each
    step decodes a short window that starts at the last token whose text was complete, and holds back what is not certain yet.
    The window stays short: of more than MAX_PENDING tokens that give no character all but the last few are taken as they are.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: list[int],
        stop: tuple[str, ...],
        include_stop: bool = False,
        hidden_text: Callable[[int], str] = lambda id: "",
    ) -> None:
        """hidden_text: what a token spells that `decode` leaves out, as it does special tokens. Stop strings are looked for in it, too."""
        self._decode = decode
        self._hidden_text = hidden_text
        self._stop = StopStrings(stop)
        self._stop_state = 0
        self._include_stop = include_stop
        self._window = _clean_tail(decode, prompt_token_ids)
        self._window_text = decode(self._window).rstrip(REPLACEMENT)
        self._num_known = len(self._window)  # tokens of the window whose text is in _window_text
        self._held: list[tuple[str, bool]] = []  # characters that may begin a stop string, and whether each is shown

    def copy(self) -> "Detokenizer":
        other = copy.copy(self)
        other._window, other._held = list(self._window), list(self._held)
        return other

    def add(self, token_id: int, may_stop: bool) -> tuple[str, str | None]:
        """Return the text that `token_id` makes certain, and the stop string that was met. `may_stop` is False before min_new_tokens."""
        piece = self._certain_text(token_id)
        characters = [*((one, True) for one in piece), *((one, False) for one in self._hidden_text(token_id))]
        return self._release(characters, may_stop) if characters else ("", None)

    def _certain_text(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT) and len(text) > len(self._window_text):
            piece = text[len(self._window_text) :]
            self._window = self._window[self._num_known :]
            self._window_text = self._decode(self._window)
            self._num_known = len(self._window)
            return piece
        return self._settle(text) if len(self._window) - self._num_known > MAX_PENDING else ""

    def flush(self) -> str:
        """Return the rest, at the end of the sequence: held text, and bytes that never became a character."""
        held, self._held = self._held, []
        return _shown(held) + self._decode(self._window)[len(self._window_text) :]

    def _settle(self, text: str) -> str:
        """Shorten a window that holds too many pending tokens, and return the text of those that leave it. `text` is the window's."""
        # A new token that has no text, as a special one has none, changes nothing for the next one.
        if not text.endswith(REPLACEMENT):
            self._window.pop()
            return ""
        # The bytes are no text. The last of them may yet begin a character, which must not be cut.
        for cut in range(len(self._window) - CHARACTER + 1, self._num_known, -1):
            rest = self._decode(self._window[cut:])
            if rest and self._decode(self._window[:cut]) + rest == text:
                break
        piece = self._decode(self._window[:cut])[len(self._window_text) :]
        self._window, self._window_text, self._num_known = self._window[cut:], "", 0
        return piece

    def _release(self, characters: list[tuple[str, bool]], may_stop: bool) -> tuple[str, str | None]:
        text = self._held + characters
        if may_stop:
            for length, (character, _) in enumerate(characters, len(self._held) + 1):
                self._stop_state, found = self._stop.advance(self._stop_state, character)
                if found:  # the string that is complete first wins, of several the longest
                    self._held = []
                    met = "".join(one for one, _ in text[length - found : length])
                    return _shown(text[: length if self._include_stop else length - found]), met
        cut = len(text) - self._stop.lengths[self._stop_state]
        self._held = text[cut:]
        return _shown(text[:cut]), None


def _shown(characters: list[tuple[str, bool]]) -> str:
    return "".join(character for character, is_shown in characters if is_shown)


def _clean_tail(decode: Callable[[list[int]], str], token_ids: list[int]) -> list[int]:
    """Return the last tokens of the prompt, from where a character begins."""
    tails = [token_ids[-count:] for count in range(FIRST_TAIL, FIRST_TAIL + CHARACTER)]
    return next((tail for tail in tails if not decode(tail).startswith(REPLACEMENT)), tails[0])
