"""Answer formats that no small model produces: parts of characters, special tokens, banned tokens."""

import math
from typing import NamedTuple

from pipelines.server.api.answers import (
    CompletionLogprobs,
    TokenTexts,
    api_finish_reason,
    api_stop_reason,
    chat_logprobs,
    prompt_logprobs,
    usage,
)
from pipelines.server.api.writers import num_reasoning_tokens

TOKENS: dict[int, bytes | None] = {1: None, 2: b" a", 3: "\u4e2d".encode()[:2], 4: "\u4e2d".encode()[2:], 5: b"b"}


class Bytes:
    """A tokenizer of these tokens; token 1 is special."""

    def token_bytes(self, id: int) -> bytes | None:
        return TOKENS[id]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "<s>" if token_ids == [1] and not skip_special_tokens else ""


class Step(NamedTuple):
    token_id: int
    logprob: float
    rank: int = 1
    top: list[tuple[int, float]] = []  # noqa: RUF012


def texts(skips_special: bool = True) -> TokenTexts:
    return TokenTexts(Bytes(), skips_special)  # type: ignore[arg-type]


def test_parts_of_characters_have_names_and_bytes() -> None:
    steps = [Step(3, -1.0, 1, [(3, -1.0)]), Step(4, -0.5), Step(1, -math.inf)]
    content = chat_logprobs(texts(), steps, 1)["content"]
    assert [entry["token"] for entry in content] == ["bytes:\\xe4\\xb8", "bytes:\\xad", "<s>"]
    assert bytes(content[0]["bytes"] + content[1]["bytes"]).decode() == "\u4e2d"
    assert content[0]["top_logprobs"] == [{"token": "bytes:\\xe4\\xb8", "logprob": -1.0, "bytes": [0xE4, 0xB8]}]
    assert content[1]["top_logprobs"] == []
    assert content[2]["logprob"] == -9999.0


def test_offsets_are_where_tokens_begin_in_the_text() -> None:
    prompt = CompletionLogprobs(texts(), 0).read_prompt(
        "a\u4e2db", [1, 2, 3, 4, 5], [Step(i, -1.0) for i in (2, 3, 4, 5)]
    )
    assert prompt["text_offset"] == [0, 0, 1, 1, 2]  # a part of a character has the character's position
    assert prompt["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0]
    kept = CompletionLogprobs(texts(skips_special=False), 0)
    assert kept.read([Step(1, -1.0)])["text_offset"] == [0]
    assert kept.read([Step(2, -1.0)])["text_offset"] == [3]


def test_the_chosen_token_is_among_the_most_likely_ones() -> None:
    (top,) = CompletionLogprobs(texts(), 1).read([Step(2, -3.0, 2, [(5, -0.1)])])["top_logprobs"]
    assert top == {"b": -0.1, " a": -3.0}
    entries = prompt_logprobs(texts(), [Step(2, -3.0, 7, [(5, -0.1)])], 1)
    assert entries[1] == {
        "5": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
        "2": {"logprob": -3.0, "rank": 7, "decoded_token": " a"},
    }


def test_without_a_tokenizer_tokens_are_called_by_their_ids() -> None:
    assert chat_logprobs(TokenTexts(None), [Step(2, -1.0)], 0)["content"][0]["token"] == "token_id:2"


def test_reasons_are_the_apis() -> None:
    assert [api_finish_reason(reason) for reason in ("stop", "length", "no_token")] == ["stop", "length", "stop"]
    assert api_finish_reason("stop", True) == "tool_calls"
    assert api_finish_reason("length", True) == "length"
    assert api_stop_reason("no_token", None) == "no_token"
    assert api_stop_reason("stop", "\n") == "\n"


class Thinks:
    """Reads text up to a b as reasoning, each character as soon as the next one arrives."""

    def __init__(self) -> None:
        self.held, self.is_over = "", False

    def read(self, text: str, token_ids: list[int]) -> list[dict[str, str]]:
        pieces = []
        for letter in text:
            if self.held and not self.is_over:
                pieces.append({"reasoning_content": self.held})
            self.held, self.is_over = letter, self.is_over or letter == "b"
        return pieces

    def end(self) -> list[dict[str, str]]:
        return [{"content": self.held}] if self.is_over else [{"reasoning_content": self.held}]


def test_tokens_of_reasoning_are_counted() -> None:
    assert num_reasoning_tokens(texts(), [1, 2, 3, 4, 5, 2, 2], Thinks()) == 4
    assert num_reasoning_tokens(texts(), [2, 2, 3, 4], Thinks()) == 4
    assert num_reasoning_tokens(texts(), [5, 2], Thinks()) == 0


def test_usage_tells_what_is_known() -> None:
    assert usage(3, None, 2) == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    details = usage(3, 1, 2, 0)
    assert details["prompt_tokens_details"] == {"cached_tokens": 1}
    assert details["completion_tokens_details"] == {"reasoning_tokens": 0}
