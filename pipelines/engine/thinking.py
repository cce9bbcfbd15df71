"""A limit on the tokens of reasoning: counts them in a row's output, and forces the closing text at the limit.

The state depends only on the output, so a row's tokens do not depend on its batch or on drafts. It is immutable, so
copies of a sequence share it. This module does not import torch.
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from conf.errors import UserError, shortened
from conf.thinking import ThinkingConfig
from models.tokenizers.base import Tokenizer

MAX_SPACES = 16  # tokens of white space after the start marker at the end of a prompt
MAX_WAIT = 3  # tokens beyond the limit that may complete a UTF-8 character, which has at most 4 bytes


@dataclass(frozen=True)
class ThinkingLimit:
    """The limit of a request, with its texts for one tokenizer."""

    max_tokens: int
    start: bytes
    """Empty: no text begins reasoning."""
    end: bytes
    closing: tuple[int, ...]
    """The tokens that are forced at the limit."""
    token_text: Callable[[int], bytes]
    """Returns the bytes that a token adds to the text, also for special tokens."""

    @property
    def tail_length(self) -> int:
        """Number of last bytes that decide with the next token whether a marker or a character is complete."""
        return max(len(self.start) - 1, len(self.end) - 1, MAX_WAIT)


@dataclass(frozen=True)
class Thinking:
    """The state of one output."""

    limit: ThinkingLimit
    is_open: bool
    """Whether the next token is reasoning."""
    num_tokens: int = 0
    """Tokens of reasoning so far, without forced tokens."""
    num_forced: int = 0
    """Tokens of the closing text so far; 0 if it has not begun or is complete."""
    tail: bytes = b""
    """The last bytes of the text since the last marker."""

    @classmethod
    def begin(cls, config: ThinkingConfig, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> "Thinking":
        """Return the state before the first output token. `config`: has a limit.

        Raises UserError without a tokenizer, and for a tokenizer that cannot spell the closing text.
        """
        if tokenizer is None:
            raise UserError("decode.thinking.max_tokens needs a tokenizer: give model.tokenizer=PATH")

        def token_text(id: int) -> bytes:
            content = tokenizer.token_bytes(id)
            if content is None and id < tokenizer.size:
                return tokenizer.decode([id], skip_special_tokens=False).encode()
            return content or b""

        start, end = config.start.encode(), config.end.encode()
        closing = tuple(tokenizer.encode(config.closing_text, add_special_tokens=False))
        if end not in b"".join(map(token_text, closing)):
            problem = f"decode.thinking.end={shortened(config.end)} cannot be written with this tokenizer"
            raise UserError(f"{problem}: give a text that its tokens spell")
        is_open = config.is_open
        if is_open is None:
            prompt_end = b"".join(map(token_text, prompt_token_ids[-len(start) - MAX_SPACES :]))
            is_open = prompt_end.rstrip().endswith(start)
        return cls(ThinkingLimit(config.max_tokens or 0, start, end, closing, token_text), is_open)

    @property
    def forced_token_id(self) -> int | None:
        """The only token that may follow; None: any token."""
        if not self.num_forced and not self._is_spent:
            return None
        return self.limit.closing[self.num_forced]

    @property
    def depends_on_next(self) -> bool:
        """Whether the next token decides if the token after it is forced."""
        is_at_limit = self.num_tokens + self.is_open >= self.limit.max_tokens
        return is_at_limit and (self.is_open or bool(self.limit.start))

    @property
    def _is_spent(self) -> bool:
        num_more = self.num_tokens - self.limit.max_tokens
        return self.is_open and (num_more >= MAX_WAIT or (num_more >= 0 and not _ends_inside_character(self.tail)))

    def after(self, token_id: int) -> "Thinking":
        """Return the state after the next token."""
        limit = self.limit
        if self.forced_token_id is not None:
            num_forced = self.num_forced + 1
            if num_forced < len(limit.closing):
                return replace(self, num_forced=num_forced)
            return Thinking(limit, False, self.num_tokens)
        num_tokens, is_open = self.num_tokens + self.is_open, self.is_open
        text = self.tail + limit.token_text(token_id)
        while (marker := limit.end if is_open else limit.start) and marker in text:
            text, is_open = text.partition(marker)[2], not is_open
        return Thinking(limit, is_open, num_tokens, tail=text[-limit.tail_length :])


def _ends_inside_character(text: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(text)
    return decoder.getstate()[0] != b""
