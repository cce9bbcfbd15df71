"""Mistral's tekken.json compared with transformers' own converter, which adds no BOS."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations.mistral.tokenizer import MistralConverter

from conf.errors import UserError
from models.formats.gguf.pre_tokenizers import TEKKEN_PATTERN
from models.tokenizers import load_tokenizer
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import MIXED, TEXTS, TRICKY, make_ranks

NUM_SPECIALS = 12
SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
PADDING = 5  # entries of the file beyond the model's vocabulary
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"


def content() -> dict[str, Any]:
    """Return a file in Mistral Small's form."""
    ranks = sorted(make_ranks().items(), key=lambda pair: pair[1])
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for token, rank in ranks
    ]
    specials = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(SPECIALS)]
    sizes = {
        "pattern": TEKKEN_PATTERN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": NUM_SPECIALS + len(vocab) - PADDING,
        "default_num_special_tokens": NUM_SPECIALS,
        "version": "v7",
    }
    return {"config": sizes, "vocab": vocab, "special_tokens": specials}


def write(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "tekken.json").write_text(json.dumps(values))
    return folder


@each("text", [*MIXED, *TEXTS, TRICKY, "", "theWord's 1234//", "[INST] hi</s>"])
def test_equals_transformers(text: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, content()))
    assert tokenizer is not None
    expected = MistralConverter(str(tmp_path / "tekken.json")).converted()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == expected.encode(text).ids
    assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.size == NUM_SPECIALS + len(make_ranks()) - PADDING == expected.get_vocab_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_conversations(tmp_path: Path) -> None:
    """The template is in a separate file. Text in a message that spells a special token is not one."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(write(tmp_path, content()))
    assert tokenizer is not None
    text, ids = tokenizer.encode_messages([{"role": "user", "content": "hi </s>"}], None)
    assert text == "<s>[INST]hi </s>[/INST]"
    assert (ids[:2], ids[-1], ids.count(2)) == ([1, 3], 4, 0)


@each(
    "changes, message",
    [
        (
            {"vocab": content()["vocab"][1:]},
            "tekken.json: its ranks are not 12 special tokens and 768 other tokens, each once",
        ),
        ({"special_tokens": [{"rank": 12, "token_str": "<s>"}]}, "its ranks are not 12 special tokens"),
        ({"special_tokens": [{"rank": 0, "token_str": "<unk>"}]}, "KeyError: '<s>'"),
        ({"config": {}}, "KeyError: 'default_num_special_tokens'"),
        ({"config": content()["config"] | {"default_vocab_size": 200}}, "tekken.json: no token is the byte 188"),
    ],
)
def test_damaged_files_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_tokenizer(write(tmp_path, content() | changes))
    assert str(raised.value).startswith(f"the tokenizer in {tmp_path} cannot be read: ")
