"""The minimum number of tokens of a text, computed without encoding: never more than the real number."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from models.formats import open_tokenizer
from models.tokenizers import Tokenizer
from models.tokenizers.huggingface import HuggingFaceTokenizer
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.real_tokenizers import load_real, real
from tests.helpers.small_tokenizers import TEXTS, TRICKY, byte_fallback, byte_level

HOSTILE = (
    " ",
    "▁",
    "\n",
    "\t",
    "<|endoftext|>",
    "<s>",
    "a\u0327\u0301",
    "\u1100\u1161\u11a8",
    "\u212a",
    "\u1fef",
    "你",
    "\0",
)
"""Texts in which one token may cover many characters, or whose bytes a normaliser reduces."""


def wrapped(backend: Backend) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(Path(), backend, {})


def check(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), repr(text[:50])


def check_all(tokenizer: Tokenizer) -> None:
    for text in (*TEXTS, TRICKY, *(text * 999 for text in HOSTILE)):
        check(tokenizer, text)
    for id in range(0, tokenizer.size, max(1, tokenizer.size // 500)):
        check(tokenizer, 9 * tokenizer.decode([id], skip_special_tokens=False))
    most = tokenizer.max_token_bytes
    assert most
    assert tokenizer.least_tokens("") == 0
    assert tokenizer.least_tokens("é" * most) == 2  # bytes, not characters


def test_tiny_and_small_ones() -> None:
    for tokenizer in (open_tokenizer(REPOSITORY / "models" / "tiny"), wrapped(byte_level()), wrapped(byte_fallback())):
        assert tokenizer is not None
        check_all(tokenizer)


@pytest.mark.long
@real
@each("name", ["gpt2", "llama2", "llama3", "qwen1", "qwen2", "chatglm2"], quick=["gpt2"])
def test_real_vocabularies(name: str, tmp_path: Path) -> None:
    check_all(load_real(name, tmp_path))


@real
@each("name", ["chatglm-6b", "baichuan1"])
def test_vocabularies_that_normalise_or_know_no_bytes_tell_nothing(name: str, tmp_path: Path) -> None:
    assert load_real(name, tmp_path).max_token_bytes is None


@pytest.mark.long
@given(st.text(alphabet=st.one_of(st.sampled_from("".join(HOSTILE)), st.characters(codec="utf-8")), max_size=200))
def test_any_text(text: str) -> None:
    for tokenizer in (wrapped(byte_level()), wrapped(byte_fallback())):
        check(tokenizer, text)


def test_bytes_match_the_text_in_its_normal_form() -> None:
    backend = byte_level()
    plain = wrapped(backend).max_token_bytes
    assert plain == max(len(token) for token in backend.get_vocab())  # one letter per byte
    backend.normalizer = normalizers.NFC()
    tokenizer = wrapped(backend)
    check_all(tokenizer)
    decomposed = "a\u0327\u0301" * 999
    composed = unicodedata.normalize("NFC", decomposed)
    assert tokenizer.max_token_bytes == plain
    assert tokenizer.least_tokens(decomposed) == tokenizer.least_tokens(composed) == -(-len(composed.encode()) // plain)


def test_nothing_is_known_where_a_token_may_stand_for_any_text() -> None:
    words = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    removing, spaces, unknown, cut = byte_level(), byte_fallback(), byte_fallback(), byte_level()
    removing.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    spaces.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", "▁")])
    unknown.model = models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    cut.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), cut.pre_tokenizer])
    shorter = byte_fallback()
    shorter.normalizer = normalizers.Replace("aaaa", "▁")
    for backend in (words, removing, spaces, unknown, cut, shorter):
        tokenizer = wrapped(backend)
        assert (tokenizer.max_token_bytes, tokenizer.least_tokens("a" * 10**6)) == (None, 0)
    for backend, text in (
        (removing, " " * 999 + "<mask>"),
        (spaces, " " * 999),
        (unknown, "你" * 999),
        (cut, " " * 999),
    ):
        assert len(wrapped(backend).encode(text, add_special_tokens=False)) <= 1  # this is the reason
