"""Answers in the formats of OpenAI's API: token texts, log probabilities, usage, choices."""

import codecs
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conf.errors import UserError
from models.tokenizers.base import Tokenizer
from pipelines.replicas.engine_process.frames import Logprob

LEAST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot express


@dataclass
class ChoiceText:
    """Output of a choice, and why it ended. Also used for parts of an output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, more: "ChoiceText") -> None:
        self.text += more.text
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.finish_reason, self.stop_reason = more.finish_reason, more.stop_reason


class Event(NamedTuple):
    """An event of a stream: a JSON object, or a text that is sent unchanged."""

    data: Any
    id: str | None = None
    name: str | None = None


DONE = Event("[DONE]")
"""The last event of OpenAI's streams."""


@dataclass(frozen=True)
class AnswerInfo:
    """Fields shared by the body and all chunks of an answer."""

    id: str
    object: str
    created: int
    """Seconds since 1970."""
    model: str
    seed: int
    system_fingerprint: str | None
    """The fingerprint, the request body and the seed together determine every bit of the answer.

    None if the bits depend on more.
    """

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return vars(self) | {"choices": choices} | more


class TokenTexts:
    """The texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None, skips_special: bool = True) -> None:
        """`skips_special`: whether special tokens are omitted from the answer's text."""
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self.text = functools.lru_cache(4096)(self._text)

    def content(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds to the text; None if it has no own text, or without a tokenizer."""
        try:
            return self._tokenizer.token_bytes(token_id) if self._tokenizer else None
        except UserError:
            return None

    def _text(self, token_id: int) -> str:
        r"""Return the display text of a token: `bytes:\xe4\xb8` for parts of characters."""
        content = self.content(token_id)
        if content is None:
            if self._tokenizer is None:
                return f"token_id:{token_id}"
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def joined(self, token_ids: list[int]) -> str:
        """Return the text of tokens; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def written(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the answer's text."""
        content = self.content(token_id)
        if content is not None:
            return content
        return b"" if self._skips_special or self._tokenizer is None else self.text(token_id).encode()


def chat_logprobs(texts: TokenTexts, steps: Iterable[Logprob], num_top: int) -> dict[str, Any]:
    """Return log probabilities in the format of chat completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = texts.text(token_id)
        content = texts.content(token_id)
        text_bytes = list(text.encode() if content is None else content)
        return {"token": text, "logprob": _finite(logprob), "bytes": text_bytes}

    content = [
        entry(step.token_id, step.logprob) | {"top_logprobs": [entry(*top) for top in step.top[:num_top]]}
        for step in steps
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Log probabilities of one choice in the format of completions. Keeps the text offset from chunk to chunk."""

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def read_prompt(self, prompt: str, token_ids: Sequence[int], steps: Sequence[Logprob]) -> dict[str, Any]:
        """Return the prompt's log probabilities. The first token has none: no token precedes it."""
        written = b"".join(map(self._texts.written, token_ids))
        self._offset = -int(written.startswith(b" ") and not prompt.startswith(" "))
        parts = self._parts(token_ids[:1], [None]), self._parts(token_ids[1:], steps)
        self._offset = len(prompt)
        self._utf8.reset()
        return {name: parts[0][name] + parts[1][name] for name in parts[0]}

    def read(self, steps: Sequence[Logprob]) -> dict[str, Any]:
        return self._parts([step.token_id for step in steps], steps)

    def _parts(self, token_ids: Sequence[int], steps: Sequence[Logprob | None]) -> dict[str, list[Any]]:
        offsets = []
        for token_id in token_ids:
            offsets.append(max(0, self._offset))
            self._offset += len(self._utf8.decode(self._texts.written(token_id)))
        return {
            "tokens": [self._texts.text(token_id) for token_id in token_ids],
            "token_logprobs": [step and _finite(step.logprob) for step in steps],
            "top_logprobs": [step and self._top(step) for step in steps],
            "text_offset": offsets,
        }

    def _top(self, step: Logprob) -> dict[str, float]:
        """Return the most likely tokens, best first, then the chosen token. Equal texts are listed once."""
        top: dict[str, float] = {}
        for token_id, logprob in [*step.top[: self._num_top], (step.token_id, step.logprob)]:
            top.setdefault(self._texts.text(token_id), _finite(logprob))
        return top


def prompt_logprobs(
    texts: TokenTexts, steps: Sequence[Logprob], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return the log probabilities of a prompt's tokens by token id, in vLLM's format; None for the first token."""

    def entries(step: Logprob) -> dict[str, dict[str, Any]]:
        ranked = [(rank, *top) for rank, top in enumerate(step.top[:num_top], 1)]
        return {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text(token_id)}
            for rank, token_id, logprob in [*ranked, (step.rank, step.token_id, step.logprob)]
        }

    return [None, *map(entries, steps)]


def usage(
    num_prompt: int, num_cached: int | None, num_generated: int, num_reasoning: int | None = None
) -> dict[str, Any]:
    """Return the token counts. Counts that are None are omitted."""
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
    if num_cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    if num_reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counts


def api_finish_reason(finish_reason: str, has_tool_calls: bool = False) -> str:
    """Return the API's name of the engine's finish reason."""
    if finish_reason == "length":
        return "length"
    return "tool_calls" if has_tool_calls else "stop"


def api_stop_reason(finish_reason: str, stop_reason: str | int | None) -> str | int | None:
    """Return what ended an answer: a stop text, a token id, or no_token if every token was banned."""
    return "no_token" if finish_reason == "no_token" else stop_reason


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
