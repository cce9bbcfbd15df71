"""The tokenizer: exact text both ways, sandboxed templates, damaged files refused, no code from a checkpoint."""

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest

from conf.errors import UserError
from models.tokenizers import Tokenizer, load_tokenizer
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import TEXTS, TRICKY, byte_fallback, byte_level, save

MESSAGES = [{"role": "user", "content": "hi"}]


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save(byte_level(), folder)
    return load(folder)


@each("text", [*TEXTS, TRICKY, "a , b . c ! it 's"])
def test_text_comes_back_exactly(tokenizer: Tokenizer, text: str, tmp_path: Path) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True) == text
    save(byte_fallback(), tmp_path)
    llama_like = load(tmp_path)
    assert llama_like.decode(llama_like.encode(text, add_special_tokens=True), skip_special_tokens=True) == text


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """A server's event loop is such a thread."""
    ends: list[float] = []

    def encode() -> None:
        ends.append(time.monotonic())
        tokenizer.encode("once upon " * 100_000, add_special_tokens=False)
        ends.append(time.monotonic())

    thread = threading.Thread(target=encode)
    thread.start()
    moments = []
    while thread.is_alive():
        moments.append(time.monotonic())
        time.sleep(0.001)
    quarter = (ends[1] - ends[0]) / 4
    assert any(ends[0] + quarter < moment < ends[1] - quarter for moment in moments)


def test_special_tokens_only_where_asked_for(tokenizer: Tokenizer) -> None:
    with_bos, without = (tokenizer.encode("Once", add_special_tokens=add) for add in (True, False))
    assert with_bos == [tokenizer.bos_token_id, *without]
    assert tokenizer.decode(with_bos, skip_special_tokens=False) == "<s>Once"
    assert tokenizer.decode(with_bos, skip_special_tokens=True) == "Once"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_templates(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_messages(MESSAGES, None)[0] == "<s>[user] hi\n[assistant] "
    assert tokenizer.encode_messages(MESSAGES, "{{ messages[0].content | upper }}")[0] == "HI"


@each(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].nope.nope }}",
        "{% for %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # escapes from the sandbox
    ],
)
def test_a_template_that_fails_is_one_clear_error(tokenizer: Tokenizer, template: str) -> None:
    with pytest.raises(UserError, match="the chat template does not take these messages"):
        tokenizer.encode_messages(MESSAGES, template)


def test_no_template_names_the_remedy(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="has no chat template: give predict.chat_template=PATH"):
        load(tmp_path).encode_messages(MESSAGES, None)


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(tmp_path) is None


@each("content", ["", "{", '{"model": 3}', "[]"])
def test_damaged_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="the tokenizer in .* cannot be read"):
        load_tokenizer(tmp_path)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with contextlib.suppress(UserError):  # refused or read as a plain tokenizer; both are acceptable
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
