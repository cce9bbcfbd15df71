"""Tokenizers inside GGUF files: equal to the plain tokenizers on real vocabularies; damaged and unknown ones refused by name."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from conf.errors import UserError
from models.formats import open_tokenizer
from models.tokenizers import Tokenizer
from tests.helpers.builders import SHARED, engine_of, write_llama
from tests.helpers.small_tokenizers import TEXTS, TRICKY, byte_level

REAL = SHARED / "data" / "tokenizers"
real = pytest.mark.skipif(not SHARED.is_dir(), reason="the real vocabularies stand beside the repository")
SPM = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab"],
    "scores": [0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0],
    "token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def load(file: Path) -> Tokenizer:
    tokenizer = open_tokenizer(file)
    assert tokenizer is not None
    return tokenizer


def write(file: Path, template: str | None = None, **keys: Any) -> Path:
    """A file of a vocabulary alone; a key that is None is left out."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def pairs(backend: Any, pre: str = "gpt-2") -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if token in ("<s>", "</s>") else 1 for token in tokens]
    merges = [" ".join(pair) for pair in model["merges"]]
    ids = {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>")}
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges} | ids


@real
@pytest.mark.parametrize(("file", "name"), [("llama-spm", "llama2"), ("phi-3", "llama2"), ("gpt-2", "gpt2")])
def test_published_vectors(file: str, name: str) -> None:
    tokenizer = load(REAL / "gguf" / f"ggml-vocab-{file}.gguf")
    for case in json.loads((REAL / name / "vectors.json").read_text(encoding="utf-8"))["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


@real
def test_baichuan() -> None:
    """Its sentencepiece model folds characters (NFKC) and has pieces that are matched before all others; the file has lost both."""
    plain = SentencePieceProcessor(model_file=str(REAL / "baichuan1" / "tokenizer.model"))
    tokenizer = load(REAL / "gguf" / "ggml-vocab-baichuan.gguf")
    cases = json.loads((REAL / "llama2" / "vectors.json").read_text(encoding="utf-8"))["cases"]
    texts = [case["text"] for case in cases]
    differing = [text for text in texts if tokenizer.encode(text, add_special_tokens=False) != plain.encode(text)]
    assert [text[:6] for text in differing] == ["ied 4 ", "\n \n\n \n"]


@real
def test_special_tokens_of_phi3() -> None:
    tokenizer = load(REAL / "gguf" / "ggml-vocab-phi-3.gguf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.size) == (1, 32000, 32064)
    text, ids = tokenizer.encode_messages([{"role": "user", "content": "Hi"}], None)
    assert text.startswith("<s><|user|>")
    assert ids[:2] == [1, 32010]


@real
def test_qwen2(tmp_path: Path) -> None:
    plain = AutoTokenizer.from_pretrained(REAL / "qwen2")
    vocabulary, merges = plain.get_vocab(), json.loads(plain.backend_tokenizer.to_str())["model"]["merges"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if token in plain.all_special_tokens else 1 for token in tokens]
    file = write(
        tmp_path / "x.gguf",
        model="gpt2",
        pre="qwen2",
        tokens=tokens,
        token_type=types,
        merges=[" ".join(m) for m in merges],
    )
    tokenizer = load(file)
    for case in json.loads((REAL / "qwen2" / "vectors.json").read_text(encoding="utf-8"))["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "don't 12345", ["don", "'t", " 12345"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("qwen2", "DON'T 123", ["DON", "'T", " ", "1", "2", "3"]),
        ("deepseek-r1-qwen", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "DON'T 12345", ["DON", "'T", " ", "123", "45"]),
    ],
)
def test_how_texts_are_cut(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    """A token for each of the words and for what they join to: the text is cut only where the pattern cuts."""
    letters = byte_level().pre_tokenizer.alphabet()
    text_in_letters = text.replace(" ", "Ġ")
    tokens, merges = sorted(letters), []
    for end in range(2, len(text_in_letters) + 1):  # every beginning of every piece of the text can be merged
        for start in range(len(text_in_letters) - end + 1):
            part = text_in_letters[start : start + end]
            if part not in tokens:
                tokens.append(part)
                merges.append(f"{part[:-1]} {part[-1]}")
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1] * len(tokens), "merges": merges}
    tokenizer = load(write(tmp_path / "x.gguf", **keys))
    found = [tokens[id].replace("Ġ", " ") for id in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(found) == text
    cuts = {sum(map(len, found[:i])) for i in range(len(found))}
    assert cuts >= {sum(map(len, words[:i])) for i in range(len(words))}


def test_sentencepiece_settings(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path / "x.gguf", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", **SPM))
    assert tokenizer.encode("a", True) == [1, 6]
    assert tokenizer.encode("<s>a", False) == [1, 6]
    assert tokenizer.encode_messages([{"role": "user", "content": "ab"}], None)[0] == "<s>ab</s>"
    other = load(write(tmp_path / "y.gguf", **SPM, add_bos_token=False, add_space_prefix=False))
    assert other.encode("a", True) == [4]
    with pytest.raises(UserError, match="has no chat template: give predict.chat_template=PATH"):
        other.encode_messages([{"role": "user", "content": "ab"}], None)


def test_byte_pairs_equal_the_same_tokenizer(tmp_path: Path) -> None:
    backend = byte_level()
    tokenizer = load(write(tmp_path / "x.gguf", **pairs(backend), add_bos_token=True))
    for text in (*TEXTS, TRICKY, "a<s>b</s>", ""):
        ids = backend.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=True) == ids
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text
    assert load(write(tmp_path / "y.gguf", **pairs(backend))).encode("x", True) == backend.encode("x").ids[1:]


def test_no_vocabulary_is_none(tmp_path: Path) -> None:
    assert open_tokenizer(write(tmp_path / "x.gguf", model="no_vocab")) is None
    assert open_tokenizer(write(tmp_path / "y.gguf")) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml: model='bert' is not supported: only 'llama', 'gpt2'"),
        ({"add_eos_token": True}, "add_eos_token=True is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens must be an array of texts, found none"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of texts, found numbers"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 values, expected 8"),
        ({"scores": [1] * 8}, "tokenizer.ggml.scores must be an array of kind 'f', found i"),
        ({"scores": [float("nan")] * 8}, "tokenizer.ggml.scores holds a number that is not finite"),
        ({"token_type": [9] * 8}, "tokenizer.ggml.token_type holds 9, expected 1 to 6"),
        ({"tokens": ["a"] * 8}, "the tokenizer in .* cannot be read: x.gguf: .*already defined"),
        ({"token_type": [2, 3, 3, 6, 1, 1, 1, 1]}, "the tokenizer in .* cannot be read: x.gguf"),
        ({"bos_token_id": 8}, "tokenizer.ggml.bos_token_id=8 is none of the 8 tokens"),
        ({"eos_token_id": -2}, "tokenizer.ggml.eos_token_id=-2 is none of the 8 tokens"),
    ],
)
def test_refused_sentencepiece(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        open_tokenizer(write(tmp_path / "x.gguf", **(SPM | keys)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "jina-v2"}, "tokenizer.ggml: pre='jina-v2' is not supported: only 'gpt-2', 'smollm', 'llama-bpe'"),
        ({"pre": None}, "tokenizer.ggml: pre=None is not supported"),
        ({"merges": ["a zzz"]}, "tokenizer.ggml.merges has 'a zzz', which does not join tokens to a token"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', which does not"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"tokens": ["a", "b"], "token_type": [1, 1]}, "tokenizer.ggml.tokens lacks 254 of the 256 bytes, '!' first"),
    ],
)
def test_refused_byte_pairs(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        open_tokenizer(write(tmp_path / "x.gguf", **(pairs(byte_level()) | keys)))


def test_a_file_is_a_tokenizer_for_any_model(tmp_path: Path) -> None:
    write_llama(tmp_path)
    file = write(tmp_path / "x.gguf", **SPM)
    tokenizer = engine_of(tmp_path, tokenizer=str(file)).tokenizer
    assert tokenizer is not None
    assert tokenizer.source == file
    assert tokenizer.encode("ab", True) == [1, 6, 5]
