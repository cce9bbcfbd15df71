"""Kimi's tokenizer compared with its published split pattern in another regex engine, and with merges by definition."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex

from conf.errors import UserError
from models.tokenizers import Tokenizer, load_tokenizer
from models.tokenizers.kimi import LONGEST_RUN, LONGEST_TEXT, pieces
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import MIXED, TEXTS, TRICKY, make_ranks, merged

# as in tokenization_kimi.py
PUBLISHED = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
ENTRIES: dict[int, dict[str, Any]] = {
    0: {"content": "[BOS]", "special": True},
    1: {"content": "[EOS]", "special": True},
    2: {"content": "<|im_end|>", "special": True},
    3: {"content": "<|im_user|>", "special": True},
    5: {"content": "<think>", "special": False},
}
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}{{ bos_token }}<think>"


RANKS = make_ranks()


def write(folder: Path, **settings: Any) -> None:
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items())
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(len(RANKS) + i): entry for i, entry in ENTRIES.items()}
    values = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
        "added_tokens_decoder": added,
        "chat_template": TEMPLATE,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "config.json").write_text('{"model_type": "kimi_k2"}')


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def expected(text: str) -> list[int]:
    words = regex.compile(PUBLISHED, regex.VERSION1).findall(text)
    assert "".join(words) == text
    return [RANKS[token] for word in words for token in merged([bytes([byte]) for byte in word.encode()], RANKS)]


@each("text", [*MIXED, *TEXTS, TRICKY, ""])
def test_equals_the_published_pattern(text: str, tmp_path: Path) -> None:
    write(tmp_path)
    tokenizer = load(tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == expected(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert b"".join(tokenizer.token_bytes(id) or b"" for id in ids) == text.encode()


def test_borders_matter_to_the_test() -> None:
    merged_ids = [RANKS[token] for token in merged([bytes([byte]) for byte in MIXED[0].encode()], RANKS)]
    assert merged_ids != expected(MIXED[0])


def test_special_tokens(tmp_path: Path) -> None:
    """All 256 ids are recognised in a text. Tokens that the settings do not call special are part of answers."""
    write(tmp_path)
    tokenizer, first = load(tmp_path), len(RANKS)
    assert tokenizer.size == first + 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.turn_end_ids) == (first, first + 1, (first + 2,))
    ids = tokenizer.encode(f"<think>a<|im_end|><|reserved_token_{first + 255}|>", add_special_tokens=False)
    assert ids == [first + 5, RANKS[b"a"], first + 2, first + 255]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a"
    assert tokenizer.token_bytes(first + 5) == b"<think>"
    assert tokenizer.token_bytes(first + 2) is tokenizer.token_bytes(first + 256) is None


def test_conversations(tmp_path: Path) -> None:
    write(tmp_path)
    tokenizer, first = load(tmp_path), len(RANKS)
    text, ids = tokenizer.encode_messages([{"role": "user", "content": "a<|im_end|>"}], None)
    assert text == "<|im_user|>a<|im_end|><|im_end|>[BOS]<think>"
    assert ids == [first + 3, *expected("a<|im_end|>"), first + 2, first, first + 5]


def published_pieces(text: str) -> list[str]:
    """Split by counting single characters."""
    result = []
    for start in range(0, len(text), LONGEST_TEXT):
        part = text[start : start + LONGEST_TEXT]
        begin = length = 0
        for i, character in enumerate(part):
            changes = i > 0 and character.isspace() != part[i - 1].isspace()
            length = 1 if changes else length + 1
            if length > LONGEST_RUN:
                result.append(part[begin:i])
                begin, length = i, 1
        result.append(part[begin:])
    return result


@each(
    "text",
    [
        "ab",
        "x" * LONGEST_RUN,
        "x" * (LONGEST_RUN + 1),
        "中" * 60_000 + " \n" + "文" * 25_001,
        "a " + " " * 52_000 + "b",
        ("word " * 100_000) + "y" * 30_000,
        "\x1c" * 25_001 + "z",
    ],
)
def test_long_texts_are_cut_as_in_the_original_code(text: str, tmp_path: Path) -> None:
    assert [*pieces(text)] == published_pieces(text)
    write(tmp_path)
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@each(
    "settings, message",
    [
        ({"added_tokens_decoder": {"3": {"content": "x"}}}, "has the id 3, which is not from"),
        ({"added_tokens_decoder": {str(len(RANKS) + i): {"content": "x"} for i in (0, 1)}}, "has a text twice"),
        ({"added_tokens_decoder": {str(len(RANKS)): {}}}, "cannot be read: KeyError"),
        ({"added_tokens_decoder": []}, "cannot be read: AttributeError"),
        ({"bos_token": "<s>"}, "names the special token '<s>', which does not exist"),
    ],
)
def test_damaged_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, **settings)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


@each(
    "changed, message",
    [
        (lambda lines: ["not base64"], "Invalid base64|Incorrect padding|Only base64"),
        (lambda lines: lines[:300] + lines[301:], "[0-9]+ tokens do not have the ranks 0 to [0-9]+, each once"),
        (lambda lines: [*lines, lines[0]], "tokens do not have the ranks"),
        (lambda lines: [*lines[:9], "AAAA 8", *lines[10:]], "tokens do not have the ranks"),
        (lambda lines: [*lines[:9], "AAAA 9", *lines[10:]], "no token is the byte 9"),
    ],
)
def test_damaged_ranks_are_refused(changed: Callable[[list[str]], list[str]], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "tiktoken.model"
    file.write_text("\n".join(changed(file.read_text().splitlines())))
    with pytest.raises(UserError, match=rf"the tokenizer in .* cannot be read: tiktoken\.model: .*({message})"):
        load_tokenizer(tmp_path)
