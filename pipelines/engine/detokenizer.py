"""Incremental detokenisation: emits only complete characters, never part of a stop string, and decodes a short window
per token.
"""

import copy
from collections.abc import Callable

from pipelines.engine.stop_strings import StopStrings

REPLACEMENT = "\ufffd"  # a decoder's output for an incomplete character
FIRST_TAIL = 8  # prompt tokens that are decoded as context of the first new token
CHARACTER = 4  # bytes of the longest character: it starts at most three tokens before its last token
MAX_PENDING = 16  # consecutive tokens whose text can still change


class Detokenizer:
    """Decodes one sequence's new tokens incrementally. The joined pieces equal the text of decoding all tokens at once.

    A token's text can depend on the previous token (a leading space) and on later tokens (bytes of one character). So
    each step decodes a short window that starts at the last token whose text was complete, and holds back text that can
    still change. The window stays short: after more than MAX_PENDING tokens without a character, all but the last few
    are emitted as they are.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: list[int],
        stop: tuple[str, ...],
        include_stop: bool = False,
        hidden_text: Callable[[int], str] = lambda id: "",
    ) -> None:
        """`hidden_text` returns the text of a token that `decode` omits, for example a special token.

        Stop strings match this text too.
        """
        self._decode = decode
        self._hidden_text = hidden_text
        self._stop = StopStrings(stop)
        self._stop_state = 0
        self._include_stop = include_stop
        self._window = _clean_tail(decode, prompt_token_ids)
        self._window_text = decode(self._window).rstrip(REPLACEMENT)
        self._num_known = len(self._window)  # tokens of the window whose text is in _window_text
        self._held: list[tuple[str, bool]] = []  # characters that can start a stop string, and whether each is shown

    def copy(self) -> "Detokenizer":
        other = copy.copy(self)
        other._window, other._held = list(self._window), list(self._held)
        return other

    def add(self, token_id: int, may_stop: bool) -> tuple[str, str | None]:
        """Return the text that `token_id` completes, and the stop string that it completes, if any.

        `may_stop` is False before min_new_tokens.
        """
        piece = self._certain_text(token_id)
        characters = [
            *((character, True) for character in piece),
            *((character, False) for character in self._hidden_text(token_id)),
        ]
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
        """Return the remaining text at the end of the sequence: held text, and bytes that never became a character."""
        held_deltas, self._held = self._held, []
        return _shown(held_deltas) + self._decode(self._window)[len(self._window_text) :]

    def _settle(self, text: str) -> str:
        """Shorten a window with too many pending tokens, and return the text of the removed tokens.

        `text` is the window's text.
        """
        # A token without text, for example a special token, does not affect the next token's text.
        if not text.endswith(REPLACEMENT):
            self._window.pop()
            return ""
        # The bytes are not valid text. The last of them can still begin a character, which must not be split.
        for cut in range(len(self._window) - CHARACTER + 1, self._num_known, -1):
            rest_text = self._decode(self._window[cut:])
            if rest_text and self._decode(self._window[:cut]) + rest_text == text:
                break
        piece = self._decode(self._window[:cut])[len(self._window_text) :]
        self._window, self._window_text, self._num_known = self._window[cut:], "", 0
        return piece

    def _release(self, characters: list[tuple[str, bool]], may_stop: bool) -> tuple[str, str | None]:
        text = self._held + characters
        if may_stop:
            for length, (character, _) in enumerate(characters, len(self._held) + 1):
                self._stop_state, num_matched = self._stop.advance(self._stop_state, character)
                if num_matched:  # the stop string that ends first; the longest if several end here
                    self._held = []
                    matched = "".join(character for character, _ in text[length - num_matched : length])
                    return _shown(text[: length if self._include_stop else length - num_matched]), matched
        cut = len(text) - self._stop.lengths[self._stop_state]
        self._held = text[cut:]
        return _shown(text[:cut]), None


def _shown(characters: list[tuple[str, bool]]) -> str:
    return "".join(character for character, is_shown in characters if is_shown)


def _clean_tail(decode: Callable[[list[int]], str], token_ids: list[int]) -> list[int]:
    """Return the last tokens of the prompt, starting at a character boundary."""
    tails = [token_ids[-count:] for count in range(FIRST_TAIL, FIRST_TAIL + CHARACTER)]
    return next((tail for tail in tails if not decode(tail).startswith(REPLACEMENT)), tails[0])
