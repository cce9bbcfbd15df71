"""Text in pieces equals the text at once, and stop strings are found at any token boundaries."""

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.stop_strings import StopStrings
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import TEXTS, TRICKY, byte_fallback, byte_level

Decode = Callable[[list[int]], str]


def decode_with(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Decode:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def pieces(
    decode: Decode, prompt: list[int], output: list[int], stop: tuple[str, ...] = (), include_stop: bool = False
) -> tuple[list[str], str | None]:
    """Return the text in pieces, and the stop string that ended it."""
    detokenizer = Detokenizer(decode, prompt, stop, include_stop)
    result = []
    for token in output:
        piece, met = detokenizer.add(token, may_stop=True)
        result.append(piece)
        if met is not None:
            return result, met
    return [*result, detokenizer.flush()], None


@each("kind", [byte_level, byte_fallback])
@each("text", [*TEXTS, TRICKY])
def test_every_split_of_a_text_joins_to_it(kind: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = kind()
    decode, ids = decode_with(tokenizer), tokenizer.encode(text).ids
    shards = [cut for cut in range(1, len(ids)) if "\ufffd" not in decode(ids[:cut])]  # between characters
    assert len(shards) > 20
    for cut in shards:
        got, _ = pieces(decode, ids[:cut], ids[cut:])
        assert decode(ids[:cut]) + "".join(got) == decode(ids)


@each("kind", [byte_level, byte_fallback])
def test_random_texts_join_to_the_whole(kind: Callable[[], Tokenizer]) -> None:
    tokenizer, rng = kind(), random.Random(0)
    decode = decode_with(tokenizer)
    for _ in range(60):
        prompt, output = ("".join(rng.choices("ab cdé 今天好，🙂👩🇨\n", k=12)) for _ in range(2))
        ids, all_ids = tokenizer.encode(prompt).ids, tokenizer.encode(prompt + output).ids
        if all_ids[: len(ids)] == ids:
            got, _ = pieces(decode, ids, all_ids[len(ids) :])
            assert decode(ids) + "".join(got) == decode(all_ids)


def test_stop_strings_are_found_in_special_tokens_that_are_not_shown() -> None:
    """As in transformers: the whole token text, a part of it, and with text before and after. Text that does not stop
    is shown."""
    tokenizer = byte_level()
    ids = tokenizer.encode("ab</s>c<s>de").ids[1:]
    specials = {tokenizer.token_to_id(name): name for name in ("<s>", "</s>")}

    def run(*stop: str, include: bool = False) -> tuple[str, str | None]:
        decode = decode_with(tokenizer)
        detokenizer = Detokenizer(decode, [], stop, include, lambda id: specials.get(id, ""))
        text = ""
        for id in ids:
            piece, met = detokenizer.add(id, may_stop=True)
            text += piece
            if met is not None:
                return text, met
        return text + detokenizer.flush(), None

    assert run("</s>") == ("ab", "</s>")
    assert run("/s") == ("ab", "/s")
    assert run("b</s>c<") == ("a", "b</s>c<")
    assert run("b</s>c<", include=True) == ("abc", "b</s>c<")
    assert run("</s>d", "<s>x", "b<s>", "e</s>") == ("abcde", None)
    assert run() == ("abcde", None)


def test_random_bytes_join_to_the_whole_even_where_they_are_not_text() -> None:
    tokenizer, rng = byte_level(), random.Random(0)
    decode = decode_with(tokenizer)
    for _ in range(60):
        prompt = tokenizer.encode("Once upon").ids
        output = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(40)]
        got, _ = pieces(decode, prompt, output)
        assert "".join(got) == decode(prompt + output)[len(decode(prompt)) :]


def test_no_half_character_is_released() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("🙂🙂").ids
    got, _ = pieces(decode_with(tokenizer), ids[:1], ids[1:])
    assert len(ids) == 9
    assert [piece for piece in got if piece] == ["🙂", "🙂"]


def test_bytes_that_never_became_a_character_come_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂").ids
    got, _ = pieces(decode_with(tokenizer), ids[:2], ids[2:4])
    assert got == ["", "", "\ufffd"]


def test_first_token_keeps_its_leading_space_after_a_prompt_and_loses_it_after_bos() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("a good day").ids
    decode = decode_with(tokenizer)
    assert "".join(pieces(decode, ids[:1], ids[1:])[0]) == "a good day"
    cut = next(i for i in range(2, len(ids)) if decode(ids[:i]) == "a")
    assert "".join(pieces(decode, ids[:cut], ids[cut:])[0]) == " good day"


def test_special_tokens_are_shown_when_asked_for() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("hello").ids + [1]
    assert "".join(pieces(decode_with(tokenizer), ids[:2], ids[2:])[0]).endswith("lo")
    assert "".join(pieces(decode_with(tokenizer, skip_special_tokens=False), ids[:2], ids[2:])[0]).endswith("lo</s>")


def by_letter(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@each(
    "text, stop, expected, met",
    [
        ("one. two", (". t",), "one", ". t"),
        ("one. three", (". tw",), "one. three", None),
        ("ababac!", ("abac",), "ab", "abac"),
        ("aaab", ("aab",), "a", "aab"),
        ("x END y", ("END", "x END y"), "x ", "END"),
        ("first\n\nsecond", ("\n\n", "st"), "fir", "st"),
        ("ends with hal", ("half",), "ends with hal", None),
        ("停下来吧", ("来吧",), "停下", "来吧"),
    ],
)
@each("size", [1, 2, 3, 7])
def test_stop_strings_across_token_boundaries(
    text: str, stop: tuple[str, ...], expected: str, met: str | None, size: int
) -> None:
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    decode = lambda ids: "".join(chunks[i - 1] if i else ">" for i in ids)  # noqa: E731
    got, stop_string = pieces(decode, [0], list(range(1, len(chunks) + 1)), stop)
    assert ("".join(got), stop_string) == (expected, met)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(by_letter, [ord(">")], ("STOP",))
    assert [detokenizer.add(ord(letter), may_stop=True)[0] for letter in "aSTxSTO"] == ["a", "", "", "STx", "", "", ""]
    assert detokenizer.flush() == "STO"


def test_no_stop_before_it_may() -> None:
    detokenizer = Detokenizer(by_letter, [ord(">")], ("ab",))
    assert [detokenizer.add(ord(letter), may_stop=False) for letter in "ab"] == [("a", None), ("b", None)]
    assert [detokenizer.add(ord(letter), may_stop=True) for letter in "ab"] == [("", None), ("", "ab")]


def brute_force(text: str, stop: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """By definition: the string that ends first; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        if length := max((len(s) for s in stop if text[:end].endswith(s)), default=0):
            return text[: end if include_stop else end - length], text[end - length : end]
    return text, None


@each("include_stop", [False, True])
def test_stop_strings_that_begin_and_contain_each_other(include_stop: bool) -> None:
    rng, num_stopped = random.Random(7), 0
    for _ in range(400):
        stop = tuple("".join(rng.choices("ab", k=rng.randint(1, 6))) + "c" * rng.randrange(2) for _ in range(3))
        text = "".join(rng.choices("abc", weights=(5, 5, 1), k=25))
        got, met = pieces(by_letter, [ord(">")], list(map(ord, text)), stop, include_stop)
        assert ("".join(got), met) == brute_force(text, stop, include_stop)
        num_stopped += met is not None
    assert num_stopped > 100


def test_stop_strings_read_each_character_once_however_long_the_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    read, advance = [], StopStrings.advance
    monkeypatch.setattr(
        StopStrings,
        "advance",
        lambda self, state, character: (read.append(character), advance(self, state, character))[1],
    )
    detokenizer = Detokenizer(by_letter, [ord(">")], ("aaab", "abab"))
    read.clear()  # of the strings themselves
    for letter in "a" * 3000:
        detokenizer.add(ord(letter), may_stop=True)
    assert len(read) == 3000


class Counting:
    """A decoder that counts its input tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self.num_tokens = 0

    def __call__(self, ids: list[int]) -> str:
        self.num_tokens += len(ids)
        return self._decode(ids)


@each("kind", [byte_level, byte_fallback])
@each("silent", ["special token", "stray byte", "first byte", "bytes and special tokens"])
def test_tokens_without_text_cost_as_much_as_others(kind: Callable[[], Tokenizer], silent: str) -> None:
    """Each new token causes a bounded amount of work, and the following text is unchanged."""
    tokenizer = kind()
    first, _, _, stray = tokenizer.encode("🙂").ids[-4:]
    special = tokenizer.token_to_id("</s>")
    repeated = {"special token": [special], "stray byte": [stray], "first byte": [first]}
    outputs = {**repeated, "bytes and special tokens": [stray, special]}
    after = tokenizer.encode("x good 今天").ids
    prompt, plain = tokenizer.encode("A dog").ids, decode_with(tokenizer)
    for num in (500, 4000):
        decode, output = Counting(plain), (outputs[silent] * num)[:num]
        got, _ = pieces(decode, prompt, output + after)
        assert plain(prompt) + "".join(got) == plain(prompt + output + after)
        assert decode.num_tokens < 60 * num  # 16 complete, 17 pending, and the tokens that shorten the window


def test_a_character_that_comes_after_many_stray_bytes_is_whole() -> None:
    tokenizer = byte_level()
    stray, character = tokenizer.encode("今").ids[-1], tokenizer.encode("🙂").ids
    for num in range(1, 60):  # wherever the window is split
        got, _ = pieces(decode_with(tokenizer), tokenizer.encode("a").ids, [stray] * num + character)
        assert "".join(got) == "\ufffd" * num + "🙂"


def test_a_prompt_without_a_character_is_not_decoded_for_each_token() -> None:
    tokenizer = byte_level()
    decode, stray = Counting(decode_with(tokenizer)), tokenizer.encode("今").ids[-1]
    detokenizer = Detokenizer(decode, [stray] * 5000, ())
    for _ in range(10):
        detokenizer.add(1, may_stop=True)
    assert decode.num_tokens < 600
