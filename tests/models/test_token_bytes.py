"""Bytes of single tokens: their concatenation is the text, and each token adds the same bytes as in `decode`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from conf.errors import UserError
from models.formats import open_tokenizer
from models.tokenizers import Tokenizer
from tests.helpers.cases import each
from tests.helpers.real_tokenizers import MODEL_TYPES, REAL, load, load_real, real
from tests.helpers.small_tokenizers import TEXTS, TRICKY, byte_fallback, byte_level, save

NUM_TRIED = 2000  # tokens of each vocabulary


def check_texts(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Check that a text's joined tokens equal the normalised text, except the space that SentencePiece adds before
    it."""
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts, text = [tokenizer.token_bytes(id) for id in ids], tokenizer.decode(ids, skip_special_tokens=False)
        assert b"".join(part for part in parts if part is not None) in (text.encode(), f" {text}".encode())
        assert None not in parts


def check_each_token(tokenizer: Tokenizer) -> None:
    """Check that `decode` adds the same bytes after another token. Tokens that are not whole characters are part of the
    texts."""
    anchor = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.decode(anchor, skip_special_tokens=True)
    num_whole = 0
    for id in range(0, tokenizer.size, max(1, tokenizer.size // NUM_TRIED)):
        token = tokenizer.token_bytes(id)
        if token is None:
            continue
        after = tokenizer.decode([*anchor, id], skip_special_tokens=True)
        try:
            text = token.decode()
        except UnicodeDecodeError:
            assert after[len(before) :].strip("\ufffd") == token.decode(errors="replace").strip("\ufffd")
            continue
        assert after == before + text
        num_whole += 1
    assert num_whole > min(tokenizer.size, NUM_TRIED) / 4
    assert tokenizer.token_bytes(-1) is tokenizer.token_bytes(tokenizer.size) is None
    for special in (tokenizer.bos_token_id, tokenizer.eos_token_id, *tokenizer.turn_end_ids):
        assert special is None or tokenizer.token_bytes(special) is None


@each("kind", [byte_level, byte_fallback])
def test_small_tokenizers(kind: Callable[[], Backend], tmp_path: Path) -> None:
    backend = kind()
    backend.add_tokens(["<added>"])
    save(backend, tmp_path)
    tokenizer = load(tmp_path)
    check_texts(tokenizer, [*TEXTS, TRICKY])
    check_each_token(tokenizer)
    assert tokenizer.token_bytes(backend.token_to_id("<added>")) in (b"<added>", b" <added>")  # as normalised
    assert [tokenizer.token_bytes(backend.token_to_id(name)) for name in ("<s>", "</s>")] == [None, None]


def test_the_shipped_tokenizer() -> None:
    tokenizer = load(Path("models/tiny"))
    check_texts(tokenizer, [*TEXTS, TRICKY])
    check_each_token(tokenizer)


@pytest.mark.long
@real
@each("name", ["llama2", "llama3", "qwen2", "gpt2", *MODEL_TYPES])
def test_real_vocabularies(name: str, tmp_path: Path) -> None:
    tokenizer = load_real(name, tmp_path)
    texts = [line for line in "\n".join([*TEXTS, TRICKY]).split("\n") if line == line.strip()]
    vectors = REAL / name / "vectors.json"
    if vectors.is_file():
        texts = [case["text"] for case in json.loads(vectors.read_text(encoding="utf-8"))["cases"]]
    check_texts(tokenizer, texts)
    check_each_token(tokenizer)


@real
@each("name", ["llama-spm", "gpt-2", "phi-3", "baichuan"])
def test_vocabularies_of_gguf(name: str) -> None:
    tokenizer = open_tokenizer(REAL / "gguf" / f"ggml-vocab-{name}.gguf")
    assert tokenizer is not None
    check_texts(tokenizer, TEXTS)
    check_each_token(tokenizer)


def test_a_decoder_of_whole_words_has_no_bytes_of_tokens(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"<unk>": 0, "a": 1, "##b": 2}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    save(backend, tmp_path)
    with pytest.raises(UserError, match="joins tokens by WordPiece, which gives a token no bytes of its own"):
        load(tmp_path).token_bytes(1)
