"""A tokenizer in the form of the C++ runner; test_runner.py compares the runner's results."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from conf.errors import UserError
from models.tokenizers.huggingface import HuggingFaceTokenizer
from models.tokenizers.split_program import Sets, compile_pattern, members
from tests.helpers import small_tokenizers
from tests.helpers.cases import each


@each(
    "pattern, feature",
    [
        (r"a\b", r"\b"),
        ("^a", "^a"),
        ("(?<=a)b", "(?<"),
        ("(?i-m:a)", "(?i"),
        ("(ab)+", "a group with +"),
        ("(a|b?){0,3}", "a group with {0,3}"),
        ("a{2}+", "{2}+"),
        ("a{2}?", "{2}?"),
        ("a|b*", "a match of no characters"),
        ("[a", "a class without end"),
        ("(a", "a group without end"),
        ("a)b", ")b"),
    ],
)
def test_patterns_that_programs_do_not_have(pattern: str, feature: str) -> None:
    with pytest.raises(UserError) as raised:
        compile_pattern(pattern, Sets(members))
    assert str(raised.value) == f"its pattern {pattern!r} has {feature!r}"


def test_sets_match_the_library() -> None:
    """The long s is one of the letters that (?i:s) matches. Every code point is in a set or in its complement."""
    sets = Sets(members)
    compile_pattern(r"(?i:s)[^\s]", sets)
    letters, rest = sets.ranges
    assert letters == (0x53, 0x53, 0x73, 0x73, 0x17F, 0x17F)
    spaces = members(r"\s")
    assert spaces[:6] == (9, 13, 32, 32, 0x85, 0x85)
    codes = [
        code
        for ranges in (spaces, rest)
        for i in range(0, len(ranges), 2)
        for code in range(ranges[i], ranges[i + 1] + 1)
    ]
    assert sorted(codes) == [*range(0x110000)]


def word_level(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.WordLevel({"a": 0}, unk_token="a")


def dropout(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.5


def lower_case(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def scripts(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.UnicodeScripts()


def late_first(tokenizer: Tokenizer) -> None:
    first = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), first])


def word_pieces(tokenizer: Tokenizer) -> None:
    tokenizer.decoder = decoders.WordPiece()


def single_word(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("cab", single_word=True)])


@each(
    "change, reason",
    [
        (word_level, "its model is WordLevel"),
        (dropout, "its model has dropout=0.5"),
        (lower_case, "its normalizer has Lowercase"),
        (scripts, "its pre_tokenizer has UnicodeScripts"),
        (late_first, "its Metaspace has prepend_scheme=first behind other steps"),
        (word_pieces, "its decoder has WordPiece"),
        (single_word, "an added token is a single_word"),
    ],
)
def test_tokenizers_that_the_runner_refuses(change: Callable[[Tokenizer], None], reason: str, tmp_path: Path) -> None:
    tokenizer = small_tokenizers.byte_fallback()
    change(tokenizer)
    with pytest.raises(UserError) as raised:
        HuggingFaceTokenizer(tmp_path, tokenizer, {}).runner_form()
    assert str(raised.value) == reason
