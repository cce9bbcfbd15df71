"""Limits of reasoning compared with their definition on whole texts: token by token, and texts of engines that compute
them in other ways."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.speculation import Speculate, SpeculationConfig
from conf.thinking import ThinkingConfig
from models.tokenizers import Tokenizer
from pipelines.engine import Engine
from pipelines.engine.thinking import Thinking
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import all_logits, engine_of, run_config
from tests.helpers.drafts import Hostile, at_random
from tests.helpers.observed_steps import look_ahead

TOKENS = [
    b"",
    b"(",
    b")",
    b"a",
    b"((",
    b"a)b",
    b")(",
    b"\xe4",
    b"\xbb",
    b"\x8a",
    b"\xe4\xbb\x8aa",
    b"\xf0\x9f",
    b"\xff",
]
BOS, EOS = 0, 1


class Letters:
    """A tokenizer of TOKENS whose first token is the special token <!>."""

    size = len(TOKENS)

    def token_bytes(self, id: int) -> bytes | None:
        return TOKENS[id] if id else None

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "" if skip_special_tokens else "<!>" * len(token_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [TOKENS.index(letter.encode()) if letter in "()a" else 0 for letter in text.replace("<!>", "!")]


def is_cut(text: bytes) -> bool:
    """Return whether other bytes would complete a character at the end of the text."""

    def is_character(letter: bytes) -> bool:
        try:
            return len(letter.decode()) == 1
        except UnicodeDecodeError:
            return False

    rests = [bytes([first]) + b"\x80" * more for first in range(0x80, 0xC0) for more in range(3)]
    return any(is_character(text[-length:] + rest) for length in (1, 2, 3) for rest in rests if len(text) >= length)


def by_definition(
    config: ThinkingConfig, is_open: bool, closing: list[int], choose: Callable[[list[int]], int | None],
    text_of: Callable[[int], bytes],
) -> list[int]:  # fmt: skip
    """Return an output token by token. `choose` returns the model's next token; None ends the output."""
    token_ids, spent, text, begin = list[int](), 0, b"", 0
    most, markers = config.max_tokens or 0, (config.start.encode(), config.end.encode())
    while True:
        if is_open and (spent >= most + 3 or (spent >= most and not is_cut(text[begin:]))):
            for id in closing:
                if choose(token_ids) is None:
                    return token_ids
                token_ids.append(id)
                text += text_of(id)
            is_open, begin = False, len(text)
            continue
        if (token := choose(token_ids)) is None:
            return token_ids
        token_ids.append(token)
        spent += is_open
        text += text_of(token)
        while (marker := markers[is_open]) and (place := text.find(marker, begin)) >= 0:
            is_open, begin = not is_open, place + len(marker)


@settings(max_examples=400)
@given(
    st.lists(st.integers(0, len(TOKENS) - 1), max_size=40),
    st.integers(0, 6),
    st.sampled_from(["(", "", "((", "<!>", "a"]),
    st.sampled_from([")", ")(", "<!>", "a"]),
    st.booleans(),
)
@example([7] * 9, 1, "", ")", True)  # never a whole character
@example([11, 8, 8, 3, 3, 3], 2, "", ")", True)  # a character of three tokens
def test_tokens_follow_the_definition(drawn: list[int], most: int, start: str, end: str, is_open: bool) -> None:
    """Also: the state says rightly whether the next token decides about the token after it."""
    config = ThinkingConfig(max_tokens=most, start=start, end=end, closing=f"a{end}(", is_open=is_open)
    tokenizer = cast(Tokenizer, Letters())
    state = Thinking.begin(config, tokenizer, [3])
    written, before = list[int](), state
    for token in drawn:
        written.append(token if state.forced_token_id is None else state.forced_token_id)
        before, state = state, state.after(written[-1])
        assert before.depends_on_next or {before.after(id).forced_token_id for id in range(len(TOKENS))} == {None}

    def choose(token_ids: list[int]) -> int | None:
        return drawn[len(token_ids)] if len(token_ids) < len(drawn) else None

    closing = tokenizer.encode(config.closing_text, False)
    assert written == by_definition(config, is_open, closing, choose, lambda id: TOKENS[id] if id else b"<!>")


def test_the_prompt_says_whether_reasoning_is_open_and_what_cannot_be_written_is_refused() -> None:
    tokenizer = Letters()
    for prompt, start, is_open in (([3, 1], "(", True), ([1, 3], "(", False), ([3, 0], "<!>", True), ([3], "", True)):
        config = ThinkingConfig(max_tokens=5, start=start)
        assert Thinking.begin(replace(config, end=")"), cast(Tokenizer, tokenizer), prompt).is_open is is_open
    with pytest.raises(UserError, match=r"^decode\.thinking\.end=</think> cannot be written with this tokenizer: give"):
        Thinking.begin(config, cast(Tokenizer, tokenizer), [3])


def expected(engine: Engine, prompt: list[int], decode: DecodeConfig) -> list[int]:
    """Return the greedy tokens of a prompt, from logits of whole texts."""
    tokenizer, config, most = engine.tokenizer, decode.thinking, int(decode.max_new_tokens or 0)
    assert tokenizer is not None

    def choose(token_ids: list[int]) -> int | None:
        return None if len(token_ids) == most else int(all_logits(engine, prompt + token_ids)[-1].argmax())

    def text_of(id: int) -> bytes:
        return tokenizer.token_bytes(id) or tokenizer.decode([id], False).encode()

    closing = tokenizer.encode(config.closing_text, False)
    return by_definition(config, bool(config.is_open), closing, choose, text_of)


LIMITS: list[dict[str, Any]] = [
    {"max_tokens": 0, "is_open": True},
    {"max_tokens": 7, "is_open": True, "closing": "\n好</think>\n\n"},
    {"max_tokens": 2, "is_open": False, "start": "a", "end": "e"},  # closes and opens again
    {"max_tokens": 30, "is_open": True},  # is never spent
]


def test_no_way_to_compute_a_text_changes_a_token(chatty: Path) -> None:
    greedy = DecodeConfig(max_new_tokens=25, ignore_eos=True, prefix_cache=False)
    decodes = [replace(greedy, thinking=ThinkingConfig(**limit)) for limit in LIMITS]
    prompts = [[BOS, 70 + 9 * i, 9] for i in range(len(LIMITS))]
    engine = engine_of(chatty, tokenizer="")
    texts = [expected(engine, prompt, decode) for prompt, decode in zip(prompts, decodes, strict=True)]
    assert texts[0] != texts[3]

    def run(engine: Engine, **settings: Any) -> list[list[int]]:
        requests = [engine.request(i, prompts[i], replace(decode, **settings)) for i, decode in enumerate(decodes)]
        outputs = sorted(engine.generate(requests), key=lambda output: output.request_id)
        return [output.completions[0].token_ids for output in outputs]

    assert run(engine) == texts
    ahead = look_ahead(looking := engine_of(chatty, tokenizer=""))
    assert run(looking) == texts
    assert any(ahead)
    assert not all(ahead)
    drafts = SpeculationConfig(model_path=str(chatty))
    drafting = replace(run_config(chatty), decode=DecodeConfig(speculate=Speculate.model, speculation=drafts))
    drafting = replace(drafting, model=replace(drafting.model, tokenizer=""))
    for kind, other in ((Speculate.model, load_engine(drafting, 3)), (Speculate.ngram, engine)):
        if kind is Speculate.ngram:
            known = {(i, 0): text for i, text in enumerate(texts)}
            other.speculator.proposers[kind] = Hostile(known, at_random(0.8))
        assert run(other, speculate=kind, speculation=SpeculationConfig(adaptive=False)) == texts
        assert other.speculator.counts.num_accepted_tokens > 0
