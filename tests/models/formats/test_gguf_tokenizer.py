"""Tokenizers inside GGUF files: equal to the plain tokenizers on real vocabularies; damaged and unknown ones are
refused by name."""

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Regex, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conf.errors import UserError
from models.formats import open_tokenizer
from models.formats.gguf.pre_tokenizers import CASED_LETTERS
from models.tokenizers import Tokenizer
from pipelines import pipeline
from tests.helpers.builders import SHARED, engine_of, write_llama
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import TEXTS, TRICKY, byte_level

REAL = SHARED / "data" / "tokenizers"
real = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real vocabularies of ../shared")
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
    """Write a vocabulary-only file. A key whose value is None is left out."""
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


GEMMA4 = {
    "model": "gemma4",
    "tokens": ["<eos>", "<bos>", "<|turn>", "a", "b", "▁", "ab", "▁ab", "\n", "\n\n", "\n\n\n\n", "<0xC3>", "<0xA9>"],
    "token_type": [3, 3, 4, *[1] * 8, 6, 6],
    "merges": ["a b", "▁ ab", "\n \n"],
    "bos_token_id": 1,
    "eos_token_id": 0,
}
GEMMA4_IDS = {  # llama.cpp 0.3.36 has these ids
    "ab ab": [1, 6, 7],
    " b  ab": [1, 5, 4, 5, 7],
    "a\n\n\nb\n\n\n\n": [1, 3, 9, 8, 4, 10],
    "<|turn>aé": [1, 2, 3, 11, 12],
    "": [1],
}


@real
@each("file, name", [("llama-spm", "llama2"), ("phi-3", "llama2"), ("gpt-2", "gpt2")])
def test_published_vectors(file: str, name: str) -> None:
    tokenizer = load(REAL / "gguf" / f"ggml-vocab-{file}.gguf")
    for case in json.loads((REAL / name / "vectors.json").read_text(encoding="utf-8"))["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


@real
def test_baichuan() -> None:
    """Its SentencePiece model normalises characters (NFKC) and has pieces that are matched before all other pieces; the
    file has lost both."""
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
    # llama.cpp's ids: white space after a special token belongs to it, except after <s>, <unk> and <|endoftext|>
    assert tokenizer.encode("<|user|>\nHello<|end|>\n<|assistant|>\n", True) == [1, 32010, 15043, 32007, 32001]
    assert tokenizer.encode("x </s>  y<|endoftext|> y", False) == [921, 29871, 2, 343, 32000, 29871, 343]
    assert {*tokenizer.turn_end_ids} == {2, 32000, 32007}
    assert tokenizer.max_token_bytes is None  # a token may represent any number of spaces


@pytest.mark.long
@real
def test_a_byte_without_a_token_is_left_out() -> None:
    """SmolLM2's file has no token for 21 bytes. transformers reads it, too, and llama.cpp gives the same ids."""
    file = next((SHARED / "data" / "models" / "smollm2_135m_instruct").glob("*.gguf"))
    tokenizer, plain = load(file), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in (
        *TEXTS,
        TRICKY,
        "\x04\x06a\x7f",
        "\xad\u0600 \uffff\U00040000",
        "<|im_start|>user\nhi<|im_end|>\n",
        "\u3000今天  é",
    ):
        assert tokenizer.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)
    assert tokenizer.encode("\x04", add_special_tokens=False) == []
    assert {*tokenizer.turn_end_ids} == {0, 2, 4}


@pytest.mark.long
@real
def test_a_downloaded_file_answers() -> None:
    folder = SHARED / "data" / "models" / "smollm2_135m_instruct"
    pipe = pipeline("text_generation", model=folder, device="cpu", overrides=["quant.block_activations=none"])
    (answer,) = pipe([{"role": "user", "content": "What is the capital of France?"}])
    assert answer["text_generation_text"][0].endswith("The capital of France is Paris.")


NORMAL, CONTROL, OWN, UNUSED = 1, 3, 4, 5


@each(
    "added, ends, texts",
    [
        # found by their texts, whatever their types
        ({"<|eot_id|>": CONTROL, "<|im_end|>": NORMAL, "<|end|>": UNUSED, "<end_of_turn>": OWN}, {2, 8, 9, 10, 11}, {}),
        (
            {"<|endoftext|>": UNUSED, "<|file_sep|>": NORMAL, "<|repo_name|>": NORMAL, "<fim_prefix>": NORMAL},
            {2, 8, 9, 10},
            {},
        ),
        # gpt-oss: <|end|> ends a part of an answer
        (
            {"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL, "<|start|>": CONTROL},
            {2, 8, 9},
            {"<|end|>", "<|start|>"},
        ),
        # with Gemma 4's token present, </s> is a text
        ({"<|tool_response>": CONTROL, "<turn|>": CONTROL}, {8, 9}, {}),
    ],
)
def test_tokens_that_end_a_text(added: dict[str, int], ends: set[int], texts: set[str], tmp_path: Path) -> None:
    """The rule of llama.cpp's llama_vocab_is_eog. `texts`: tokens that are shown in an answer."""
    keys: dict[str, Any] = {name: value for name, value in SPM.items() if name not in ("bos_token_id", "eos_token_id")}
    keys["tokens"], keys["token_type"] = [*SPM["tokens"], *added], [*SPM["token_type"], *added.values()]
    keys["scores"] = [*SPM["scores"], *([-9.0] * len(added))]
    tokenizer = load(write(tmp_path / "x.gguf", **keys))
    assert {*tokenizer.turn_end_ids} == ends
    for id, text in enumerate(added, len(SPM["tokens"])):
        assert tokenizer.encode(f"a{text}", add_special_tokens=False) == [6, id]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_ids_that_a_file_does_not_give(tmp_path: Path) -> None:
    silent = {name: value for name, value in SPM.items() if name not in ("bos_token_id", "eos_token_id")}
    tokenizer = load(write(tmp_path / "x.gguf", **silent))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    without = load(write(tmp_path / "y.gguf", **silent, bos_token_id=-1, eos_token_id=-1))
    assert (without.bos_token_id, without.eos_token_id) == (None, None)
    assert without.encode("a", add_special_tokens=True) == [6]


def test_a_token_of_ones_own_stands_between_two_texts(tmp_path: Path) -> None:
    keys = SPM | {
        "tokens": [*SPM["tokens"], "<u>"],
        "scores": [*SPM["scores"], -9.0],
        "token_type": [*SPM["token_type"], OWN],
    }
    tokenizer = load(write(tmp_path / "x.gguf", **keys))
    assert tokenizer.encode("<u>a<u>ab", add_special_tokens=False) == [8, 6, 8, 6, 5]
    assert tokenizer.decode([8, 6], skip_special_tokens=True) == "<u>a"


@pytest.mark.long
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


@each(
    "pre, text, words",
    [
        ("gpt-2", "don't 12345", ["don", "'t", " 12345"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("qwen2", "DON'T 123", ["DON", "'T", " ", "1", "2", "3"]),
        ("deepseek-r1-qwen", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "DON'T 12345", ["DON", "'T", " ", "123", "45"]),
        ("llama3", "a 1234", ["a", " ", "123", "4"]),
        ("falcon3", "a 1234", ["a", " ", "123", "4"]),
        ("glm4", "It's 1234", ["It", "'s", " ", "123", "4"]),
        ("chatglm-bpe", "a 1234", ["a", " ", "123", "4"]),
        ("dbrx", "a\n\n 1234", ["a", "\n\n", " ", "123", "4"]),
        ("smaug-bpe", "a 1234", ["a", " ", "123", "4"]),
        ("gpt-4o", "theWord's 1234//", ["the", "Word's", " ", "123", "4", "//"]),
        ("tekken", "theWord's 12//", ["the", "Word", "'s", " ", "1", "2", "//"]),
        ("deepseek-llm", "Ab, 12 c\nd", ["Ab", ",", " ", "12", " c", "\n", "d"]),
        ("deepseek-coder", "Ab, 12 c\nd", ["Ab", ",", " ", "1", "2", " c", "\n", "d"]),
        ("deepseek-v3", "(ab 1234 c!\n", ["(ab", " ", "123", "4", " c", "!\n"]),
        ("llama4", "theWord's 1234//", ["the", "Word's", " ", "123", "4", "//"]),
        ("exaone-moe", "the cat's 12//\n/x\n\n", ["the cat", "'s", " ", "1", "2", "//\n", "/x", "\n\n"]),
        ("bloom", "ab cd, 12(3) e", ["ab", " cd", ",", " 12", "(", "3", ")", " e"]),
    ],
)
def test_how_texts_are_cut(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    """There is a token for each word and for each concatenation of words: the text is split only where the pattern
    splits it."""
    letters = byte_level().pre_tokenizer.alphabet()
    text_in_letters = text.replace(" ", "Ġ").replace("\n", "Ċ")
    tokens, merges = sorted(letters), []
    for end in range(2, len(text_in_letters) + 1):  # every beginning of every piece of the text can be merged
        for start in range(len(text_in_letters) - end + 1):
            part = text_in_letters[start : start + end]
            if part not in tokens:
                tokens.append(part)
                merges.append(f"{part[:-1]} {part[-1]}")
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1] * len(tokens), "merges": merges}
    tokenizer = load(write(tmp_path / "x.gguf", **keys))
    pieces = [
        tokens[id].replace("Ġ", " ").replace("Ċ", "\n") for id in tokenizer.encode(text, add_special_tokens=False)
    ]
    assert "".join(pieces) == text
    cuts = {sum(map(len, pieces[:i])) for i in range(len(pieces))}
    assert cuts >= {sum(map(len, words[:i])) for i in range(len(words))}


def split(*alternatives: str) -> dict[str, Any]:
    """Return a step of tokenizer.json with a pattern of these alternatives."""
    return {"type": "Split", "pattern": {"Regex": "|".join(alternatives)}, "behavior": "Isolated", "invert": False}


CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
TO_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PUBLISHED = {  # pre_tokenizer of tokenizer.json of DeepSeek-V2 and -V3, BLOOM, Phi-4-mini, GLM-4, Falcon and Jais 2
    "deepseek-llm": [
        split("[\r\n]"),
        split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+"),  # only the letters of the tests' texts
        split("\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"),
        split(r"\s+$"),
        split("[一-龥ࠀ-一가-\ud7ff]+"),
        {"type": "Digits", "individual_digits": True},
    ],
    "deepseek-v3": [
        split(r"\p{N}{1,3}"),
        split("[一-龥\u3040-ゟ゠-ヿ]+"),
        split(
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            *SPACES,
        ),
    ],
    "bloom": [split(r" ?[^(\s|[.,!?…。，、।۔،])]+")],
    "gpt-4o": [
        split(
            f"{BEFORE_WORD}{UPPER}*{LOWER}+{CONTRACTION}?",
            f"{BEFORE_WORD}{UPPER}+{LOWER}*{CONTRACTION}?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            *SPACES,
        )
    ],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        TO_BYTES | {"use_regex": True},
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ],
    "jais-2": [
        split(
            CONTRACTION,
            BEFORE_WORD + r"\p{L}+",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            *(rf"\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1)),
            r"\s{1,2}(?!\S)",
            r"\s{1}",
        )
    ],
    "glm4": [split(CONTRACTION, BEFORE_WORD + r"\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", *SPACES)],
}


@each("pre", PUBLISHED)
def test_ids_match_tokenizer_json(pre: str, tmp_path: Path) -> None:
    """A vocabulary trained on texts that are split as the family's tokenizer.json says, read by transformers and from
    GGUF."""
    settings = json.loads(byte_level().to_str())
    to_bytes = [] if pre == "falcon" else [TO_BYTES]
    settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*PUBLISHED[pre], *to_bytes]}
    settings["model"] |= {"vocab": {"<s>": 0, "</s>": 1}, "merges": []}
    backend = Backend.from_str(json.dumps(settings))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*TEXTS, TRICKY], trainer)
    plain = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = load(write(tmp_path / "x.gguf", **pairs(backend, pre)))
    for text in (*TEXTS, TRICKY, "It's (12345), DON'T…  \n\n", "今天12 é　。", "a" + " " * 41 + "b $1,234<=56", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == plain.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.long
def test_cased_letters_are_letters_with_a_case() -> None:
    """By Unicode categories, which reveal a mistyped range."""
    cut = pre_tokenizers.Split(Regex(f"[{CASED_LETTERS}]"), "removed")
    categories = {chr(code): unicodedata.category(chr(code)) for code in range(sys.maxunicode + 1)}
    others = "".join(letter for letter, kind in categories.items() if kind not in ("Lu", "Ll", "Lt", "Cs"))
    assert cut.pre_tokenize_str(others) == [(others, (0, len(others)))]
    assert cut.pre_tokenize_str("AzµßÖʓΑωЯՖℵ") == [("ℵ", (10, 11))]


def test_gemma(tmp_path: Path) -> None:
    """User-defined pieces are matched first. Nothing is added before a text, and no space is lost. Gemma 4's tokenizer is
    BPE of characters."""
    tokenizer = load(write(tmp_path / "x.gguf", **GEMMA4))
    for text, ids in GEMMA4_IDS.items():
        assert list(tokenizer.encode(text, True)) == ids
        assert tokenizer.decode(ids[1:], False) == text
    user_pieces = ["<start_of_turn>", "▁▁", "▁▁▁", "\n\n"]
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_prefix=str(tmp_path / "gemma"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        user_defined_symbols=user_pieces,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    plain = SentencePieceProcessor(model_file=str(tmp_path / "gemma.model"))
    model = ModelProto.FromString((tmp_path / "gemma.model").read_bytes())
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": [piece.piece for piece in model.pieces],  # llama.cpp's converter writes spaces in user-defined pieces
        "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_space_prefix": False,
    }
    spaces = [piece.piece.replace("▁", " ") if piece.type == OWN else piece.piece for piece in model.pieces]
    for number, tokens in enumerate((keys["tokens"], spaces)):
        tokenizer = load(write(tmp_path / f"{number}.gguf", **{**keys, "tokens": tokens}))
        for text in (*TEXTS, TRICKY, "<start_of_turn>user\n\n   a", " x", "def f(n):\n    \n\n\n  \t" + " " * 9):
            assert tokenizer.encode(text, add_special_tokens=True) == [2, *plain.encode(text)]
            assert tokenizer.decode(plain.encode(text), skip_special_tokens=False) == text


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


@each(
    "keys, message",
    [
        ({"model": "bert"}, "tokenizer.ggml: model='bert' is not supported: only 'llama', 'gpt2', 'gemma4'"),
        ({"add_eos_token": True}, "add_eos_token=True is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens must be an array of texts, found none"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of texts, found numbers"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 values, expected 8"),
        ({"scores": [1] * 8}, "tokenizer.ggml.scores must be an array of kind 'f', found i"),
        ({"scores": [float("nan")] * 8}, "tokenizer.ggml.scores holds a number that is not finite"),
        ({"token_type": [9] * 8}, "tokenizer.ggml.token_type holds 9, expected 1 to 6"),
        ({"tokens": ["a"] * 8}, "the tokenizer in .* cannot be read: x.gguf: .*already defined"),
        ({"token_type": [2, 3, 3, 6, 1, 1, 1, 1]}, "the tokenizer in .* cannot be read: x.gguf"),
        ({"bos_token_id": 8}, "tokenizer.ggml.bos_token_id=8 is not the id of one of the 8 tokens"),
        ({"eos_token_id": -2}, "tokenizer.ggml.eos_token_id=-2 is not the id of one of the 8 tokens"),
    ],
)
def test_refused_sentencepiece(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        open_tokenizer(write(tmp_path / "x.gguf", **(SPM | keys)))


@each(
    "keys, message",
    [
        (
            {"pre": "jina-v2", "model": "gpt2"},
            "tokenizer.ggml: pre='jina-v2' is not supported: only 'gpt-2', 'phi-2', .*: give the Hugging Face checkpoint",
        ),
        ({"pre": None}, "tokenizer.ggml: pre=None is not supported"),
        ({"merges": ["a zzz"]}, "tokenizer.ggml.merges has 'a zzz', which does not join tokens to a token"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', which does not"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "tokenizer.ggml.tokens has 'a' twice"),
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
