"""How rows become token ids: special tokens, templates, given ids."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from conf.errors import UserError
from conf.tasks import Truncation
from models.tokenizers import Tokenizer, load_tokenizer
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import PromptRow
from tests.helpers.cases import each
from tests.helpers.prompt_files import HELLO, read_jsonl, write

BOS, EOS = "<s>", "</s>"
VOCABULARY = {text: i for i, text in enumerate([BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def ids(text: str) -> list[int]:
    """Return the tokens of an ASCII text without spaces: one per character."""
    return [VOCABULARY[character] for character in text]


def save_tokenizer(folder: Path, **settings: Any) -> Tokenizer:
    """Save a byte-level tokenizer that adds a BOS."""
    library = Library(models.BPE(vocab=VOCABULARY, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([BOS, EOS])
    if settings.pop("writes_bos", True):
        special = [(BOS, VOCABULARY[BOS])]
        library.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=special)
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return save_tokenizer(tmp_path, chat_template=TEMPLATE)


def test_text_prompt(tokenizer: Tokenizer) -> None:
    encoded = PromptEncoder(tokenizer, True, "auto").encode(PromptRow(0, prompt="hi"))
    assert (encoded.text, encoded.token_ids) == ("hi", [VOCABULARY[BOS], *ids("hi")])

    assert PromptEncoder(tokenizer, False, "auto").encode(PromptRow(0, prompt="hi")).token_ids == ids("hi")


@each("template", ["auto", "none"])
def test_ids_are_taken_as_they_are(tokenizer: Tokenizer, template: str) -> None:
    row = PromptRow(0, prompt_token_ids=[*ids("ab"), VOCABULARY[EOS]])
    encoded = PromptEncoder(tokenizer, True, template).encode(row)
    assert (encoded.text, encoded.token_ids) == ("ab", row.prompt_token_ids)
    bare = PromptEncoder(None, True, template).encode(row)
    assert (bare.text, bare.token_ids) == (None, row.prompt_token_ids)


def test_a_prompt_that_is_too_long_is_cut_as_transformers_cuts_it(tmp_path: Path) -> None:
    """A text keeps its special tokens; ids, and the output of a template, are cut directly."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_folder = save_tokenizer(tmp_path, chat_template=TEMPLATE)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for side in (Truncation.left, Truncation.right):
        theirs.truncation_side = side.name
        for most in (1, 2, 5, 9, 10, 40):
            encoder = PromptEncoder(tokenizer_folder, True, "auto", truncate=side, max_tokens=most)
            encoded = encoder.encode(PromptRow(0, prompt="abcabcabc"))
            assert encoded.token_ids == theirs("abcabcabc", truncation=True, max_length=most).input_ids
            assert (encoded.text, encoded.num_truncated) == ("abcabcabc", max(0, 10 - most))
            expected = [VOCABULARY[BOS], *ids("[user]hi[assistant]")]
            for row in (PromptRow(0, messages=HELLO), PromptRow(0, prompt_token_ids=expected)):
                cut = encoder.encode(row)
                assert cut.token_ids == (expected[-most:] if side is Truncation.left else expected[:most])
                assert cut.num_truncated == max(0, len(expected) - most)


@each("token", [-1, 10**6, 2**40, 10**30])
def test_ids_that_no_tokenizer_knows_are_a_fault_of_their_row_at_most(tmp_path: Path, token: int) -> None:
    encoder = PromptEncoder(save_tokenizer(tmp_path), True, "auto")
    (row,) = read_jsonl(tmp_path, {"prompt_token_ids": [token]})
    with contextlib.suppress(UserError):
        assert encoder.encode(row).token_ids == [token]


@each("special", [True, False])
def test_template_writes_the_only_bos(tokenizer: Tokenizer, special: bool) -> None:
    encoded = PromptEncoder(tokenizer, special, "auto").encode(PromptRow(0, messages=HELLO))
    assert encoded.text == "<s>[user]hi[assistant]"
    assert encoded.token_ids == [VOCABULARY[BOS], *ids("[user]hi[assistant]")]


def test_template_of_a_file_serves_texts_and_messages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path, "template.jinja", "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}é")
    encoder = PromptEncoder(tokenizer, True, path)
    for row in (PromptRow(0, prompt="hi"), PromptRow(0, messages=HELLO)):
        encoded = encoder.encode(row)
        assert encoded.text == "(user)hié"
        assert encoded.token_ids[:8] == ids("(user)hi")


def test_no_templates(tokenizer: Tokenizer) -> None:
    encoder = PromptEncoder(tokenizer, False, "none")
    assert encoder.encode(PromptRow(0, prompt="hi")).token_ids == ids("hi")
    with pytest.raises(UserError, match=r"predict\.chat_template=none: give auto or a path"):
        encoder.encode(PromptRow(0, messages=HELLO))


def test_tokenizer_without_a_template(tmp_path: Path) -> None:
    encoder = PromptEncoder(save_tokenizer(tmp_path), False, "auto")
    with pytest.raises(UserError, match=r"has no chat template: give predict\.chat_template=PATH"):
        encoder.encode(PromptRow(0, messages=HELLO))


@each("template", ["{% if %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"])
def test_template_that_fails(tokenizer: Tokenizer, tmp_path: Path, template: str) -> None:
    encoder = PromptEncoder(tokenizer, True, write(tmp_path, "template.jinja", template))
    with pytest.raises(UserError, match="the chat template does not take these messages"):
        encoder.encode(PromptRow(0, messages=HELLO))


def test_a_template_in_the_home_folder(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "template.jinja", "{{ messages[0].content }}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PromptEncoder(tokenizer, True, "~/template.jinja").encode(PromptRow(0, messages=HELLO)).text == "hi"


@each("content", [None, b"\xff"])
def test_template_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = str(tmp_path / "nope") if content is None else write(tmp_path, "template.jinja", content)
    with pytest.raises(UserError, match=r"predict\.chat_template=.* cannot be read .*: give auto, none or the path"):
        PromptEncoder(None, True, path)


@each("row", [PromptRow(0, prompt="hi"), PromptRow(0, messages=HELLO)])
def test_no_tokenizer(row: PromptRow) -> None:
    with pytest.raises(UserError, match=r"no tokenizer for this text: give prompt_token_ids, or model\.tokenizer=PATH"):
        PromptEncoder(None, True, "auto").encode(row)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"prompt": "ab\ud800"}, id="prompt"),
        pytest.param({"messages": [*HELLO, {"role": "user", "content": "ab\ud800"}]}, id="content"),
        pytest.param({"messages": [{"role": "ab\ud800", "content": "hi"}]}, id="role"),
    ],
)
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer, tmp_path: Path, row: object) -> None:
    (read,) = read_jsonl(tmp_path, row)
    with pytest.raises(UserError, match="half a surrogate pair"):
        PromptEncoder(tokenizer, True, "auto").encode(read)


def test_row_with_an_error_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="^what is wrong$"):
        PromptEncoder(tokenizer, True, "auto").encode(PromptRow(0, error="what is wrong"))


@each(("special", "expected"), [(True, [VOCABULARY[BOS]]), (False, [])])
def test_empty_prompt_becomes_the_bos(tmp_path: Path, special: bool, expected: list[int]) -> None:
    encoder = PromptEncoder(save_tokenizer(tmp_path, writes_bos=False), special, "auto")
    assert encoder.encode(PromptRow(0, prompt="")).token_ids == expected
    assert encoder.encode(PromptRow(0, prompt="a")).token_ids == ids("a")
