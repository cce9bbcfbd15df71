"""Tokenizers of families compared with their original classes and published vectors, on the real vocabularies and on
tiny ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conf.errors import UserError
from models.tokenizers import Tokenizer, load_tokenizer
from tests.helpers.builders import SHARED
from tests.helpers.cases import each

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real vocabularies of ../shared")

REAL = SHARED / "data" / "tokenizers"
TINY = SHARED / "goldens"
PROMPTS = "prompt_vectors.json"


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def real(name: str, tmp_path: Path, **config: Any) -> Tokenizer:
    """Return the real vocabulary next to a config.json that names its family."""
    for file in (REAL / name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load(tmp_path)


def conversation(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system is not None else messages


@pytest.mark.long
@each("name", ["llama2", "llama3", "qwen2", "gpt2"], quick=["qwen2"])
def test_published_vectors(name: str) -> None:
    tokenizer = load(REAL / name)
    for case in json.loads((REAL / name / "vectors.json").read_text(encoding="utf-8"))["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]


@pytest.mark.long
@each("name", ["llama2", "llama3", "qwen2", "gpt2", "qwen1", "chatglm2", "baichuan1"])
def test_texts_come_back(name: str, tmp_path: Path) -> None:
    family = {"qwen1": "qwen", "chatglm2": "chatglm", "baichuan1": "baichuan"}.get(name)
    tokenizer = real(name, tmp_path, model_type=family) if family else load(REAL / name)
    for file in sorted((SHARED / "data" / "text").rglob("*.txt")):
        text = file.read_text(encoding="utf-8")[:20_000]
        for line in text.split("\n"):
            assert tokenizer.decode(tokenizer.encode(line, False), skip_special_tokens=False) == line


@each("family", ["chatglm", "chatglm2", "chatglm3", "baichuan-13b", "baichuan2-7b", "qwen"])
def test_equals_the_original_class(family: str) -> None:
    tokenizer = load(TINY / family)
    golden = json.loads((TINY / family / "tokenizer_golden.json").read_text(encoding="utf-8"))
    for case in golden["texts"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.encode(case["text"], add_special_tokens=True) == case.get("ids_with_special", case["ids"])
        # Qwen reads special tokens in a text; the other tokenizers have none to show.
        assert tokenizer.decode(case["ids"], skip_special_tokens=family != "qwen") == case["decode_of_ids"]
    for case in golden["chat"]:
        text, ids = tokenizer.encode_messages(messages_of(case), None)
        assert ids == case["ids"]
        if "prompt" in case and family == "qwen":
            assert text == case["prompt"]


def messages_of(case: dict[str, Any]) -> list[dict[str, str]]:
    if "messages" in case:
        return list(case["messages"])
    if case["history"] and isinstance(case["history"][0], dict):
        return [*case["history"], {"role": case["role"], "content": case["query"]}]
    texts = [text for turn in case["history"] for text in turn]
    return conversation(*texts, case["query"], system=case.get("system"))


def test_llama2_conversations(tmp_path: Path) -> None:
    tokenizer = real("llama2", tmp_path, model_type="llama")
    vectors = json.loads((TINY / PROMPTS).read_text(encoding="utf-8"))["llama-2-chat"]
    one, two = vectors["no_system_1turn"], vectors["system_2turns"]
    assert tokenizer.encode_messages(conversation(" Hi there "), None) == (one["text"], one["ids"])
    messages = conversation("Hi there", "Hello! How can I help?", "What is 2+2?", system="You are a helpful assistant.")
    assert tokenizer.encode_messages(messages, None) == (two["text"], two["ids"])
    with pytest.raises(UserError, match="the chat template does not take these messages: the roles are system"):
        tokenizer.encode_messages([{"role": "tool", "content": "x"}], None)


def test_llama3_conversations() -> None:
    tokenizer = load(REAL / "llama3")
    vectors = json.loads((TINY / PROMPTS).read_text(encoding="utf-8"))["llama-3-instruct"]
    for name, id in vectors["special_ids"].items():
        assert tokenizer.encode(name, add_special_tokens=False) == [id]
    one, two = vectors["1turn"], vectors["system_2turns"]
    assert tokenizer.encode_messages(conversation("Hi there"), None) == (one["text"], one["ids"])
    messages = conversation("Hi there", "Hello! How can I help?", "What is 2+2?", system="You are a helpful assistant.")
    assert tokenizer.encode_messages(messages, None) == (two["text"], two["ids"])
    assert tokenizer.encode("x", add_special_tokens=True)[0] == tokenizer.bos_token_id == 128000


@pytest.mark.long
def test_qwen_conversations(tmp_path: Path) -> None:
    tokenizer = real("qwen1", tmp_path, model_type="qwen")
    vectors = json.loads((TINY / PROMPTS).read_text(encoding="utf-8"))["qwen-7b-chat (v1)"]
    for text, ids in vectors["plain"].items():
        assert tokenizer.encode(text, add_special_tokens=True) == ids
    messages = conversation("Hi there", "Hello! How can I help?", "What is 2+2?", system="You are a helpful assistant.")
    assert tokenizer.encode_messages(messages, None)[1] == vectors["system_2turns"]["ids"]
    assert tokenizer.encode_messages(messages[1:], None)[1] == vectors["system_2turns"]["ids"]
    empty = vectors["empty_system_1turn"]
    assert tokenizer.encode_messages(conversation("Hi there", system=""), None) == (empty["text"], empty["ids"])


def test_chatglm_conversations(tmp_path: Path) -> None:
    tokenizer = real("chatglm-6b", tmp_path, model_type="chatglm")
    vectors = json.loads((TINY / PROMPTS).read_text(encoding="utf-8"))["chatglm-6b (v1)"]
    for text, ids in vectors["plain"].items():
        assert tokenizer.encode(text, add_special_tokens=True) == ids
    two = vectors["2turns"]
    assert tokenizer.encode(two["text"], add_special_tokens=True) == two["ids"]


@each("version", [2, 3])
def test_chatglm2_and_3_conversations(version: int, tmp_path: Path) -> None:
    tokenizer = real("chatglm2", tmp_path, model_type="chatglm", seq_length=32768 if version == 2 else 8192)
    vectors = json.loads((TINY / PROMPTS).read_text(encoding="utf-8"))[f"chatglm{version}-6b"]
    assert tokenizer.encode_messages(conversation("你好"), None)[1] == vectors["1turn"]["ids"]
    answer = f"你好👋！我是人工智能助手 ChatGLM{version}-6B，很高兴见到你，欢迎问我任何问题。"
    messages = conversation("你好", answer, "晚上睡不着应该怎么办")
    assert tokenizer.encode_messages(messages, None)[1] == vectors["2turns"]["ids"]
    wrong = [{"role": "tool", "content": "x"}]
    with pytest.raises(
        UserError, match="the chat template does not take these messages: (the roles must be|role 'tool')"
    ):
        tokenizer.encode_messages(wrong, None)


@each("version", [2, 3])
def test_chatglm2_and_3_of_paddlenlp(version: int, tmp_path: Path) -> None:
    """PaddleNLP uses its own names for the family and the length, and may add a training length."""
    length = 32768 if version == 2 else 8192
    tokenizer = real("chatglm2", tmp_path, model_type="chatglm_v2", max_sequence_length=length, seq_length=2048)
    vectors = json.loads((TINY / PROMPTS).read_text(encoding="utf-8"))[f"chatglm{version}-6b"]
    assert tokenizer.encode_messages(conversation("你好"), None)[1] == vectors["1turn"]["ids"]


def test_pieces_under_the_name_of_paddlenlp(tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").symlink_to(REAL / "llama2" / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load(tmp_path)
    for case in json.loads((REAL / "llama2" / "vectors.json").read_text(encoding="utf-8"))["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=True) == [1, *case["ids"]]
    assert tokenizer.encode_messages(conversation("Hi"), None)[0].startswith("<s>[INST] Hi")
    (tmp_path / "chat_template.json").write_text(
        '{"conversation": ["Human: {{user}}", "{{bot}}"], "query": "{{query}}"}'
    )
    with pytest.raises(UserError, match="has no chat template: give predict.chat_template=PATH"):
        load(tmp_path).encode_messages(conversation("Hi"), None)


def test_gpt_of_paddlenlp(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPTTokenizer"}')
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).symlink_to(REAL / "gpt2" / file)
    (tmp_path / "config.json").write_text('{"model_type": "gpt"}')
    tokenizer = load(tmp_path)
    for case in json.loads((REAL / "gpt2" / "vectors.json").read_text(encoding="utf-8"))["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=True) == case["ids"]


def test_baichuan_conversations(tmp_path: Path) -> None:
    tokenizer = real("baichuan1", tmp_path, model_type="baichuan")
    with pytest.raises(UserError, match="has no chat template: give predict.chat_template=PATH"):
        tokenizer.encode_messages(conversation("你好"), None)  # the base model has no ids for turns
    (tmp_path / "generation_config.json").write_text('{"user_token_id": 195, "assistant_token_id": 196}')
    chat, vectors = load(tmp_path), json.loads((TINY / PROMPTS).read_text(encoding="utf-8"))["baichuan-13b-chat (v1)"]
    for text, ids in vectors["plain"].items():
        assert chat.encode(text, add_special_tokens=True) == ids
    ids = chat.encode_messages(conversation(*vectors["2turns"]["messages"]), None)[1]
    assert [id for id in ids if id != chat.eos_token_id] == vectors["2turns"]["ids"]  # of the code before eos was added
    with pytest.raises(UserError, match="role 'system' is none of user, assistant"):
        chat.encode_messages(conversation("x", system="y"), None)


def test_special_tokens_in_the_place_of_pieces(tmp_path: Path) -> None:
    """InternLM2 has only tokenizer.model, and renames pieces in tokenizer_config.json."""
    (tmp_path / "tokenizer.model").symlink_to(REAL / "llama2" / "tokenizer.model")
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    added = {"1": "<s>", "31998": "<|im_start|>", "31999": "<|im_end|>", "32000": "<|plugin|>"}
    settings: dict[str, Any] = {
        "added_tokens_decoder": {id: {"content": name, "special": True} for id, name in added.items()},
        "bos_token": "<s>",
        "chat_template": template,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "internlm2"}')
    tokenizer = load(tmp_path)
    hi = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.size == 32001
    assert tokenizer.encode("hi<|im_end|><|plugin|>", add_special_tokens=True) == [1, *hi, 31999, 32000]
    assert tokenizer.decode([*hi, 31999], skip_special_tokens=True) == "hi"
    assert tokenizer.decode([31998, *hi, 32000], skip_special_tokens=False) == "<|im_start|>hi<|plugin|>"
    assert tokenizer.token_bytes(31999) is None
    text, ids = tokenizer.encode_messages([{"role": "user", "content": "hi"}], None)
    assert (text, ids) == ("<s><|im_start|>hi<|im_end|>", [1, 31998, *hi, 31999])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    assert load(tmp_path).encode("hi", add_special_tokens=True) == hi
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    with pytest.raises(UserError, match="has no chat template: give predict.chat_template=PATH"):
        load(tmp_path).encode_messages([{"role": "user", "content": "hi"}], None)  # Llama 2's is not InternLM2's
    plain = {"added_tokens_decoder": {"31999": {"content": "<think>", "special": False}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(plain))
    assert load(tmp_path).encode("hi<think>", add_special_tokens=False) == [*hi, 31999]
    assert load(tmp_path).decode([*hi, 31999], skip_special_tokens=True) == "hi<think>"
    assert load(tmp_path).token_bytes(31999) == b"<think>"


def added(id: int, content: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {str(id): {"content": content, **{name: flags.get(name, False) for name in names}}}


NEW = {"<|im_start|>": 32000, "<|im_end|>": 32001, "<tool>": 32002}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
WITH_TOKENS: dict[str, dict[str, Any]] = {
    "added_tokens.json and special_tokens_map.json": {
        "added_tokens.json": NEW,
        "special_tokens_map.json": {"eos_token": "<|im_end|>", "unk_token": "<unk>"},
        "tokenizer_config.json": LLAMA,
    },
    "added_tokens_decoder, white space beside tokens": {
        "tokenizer_config.json": LLAMA
        | {"eos_token": "<|im_end|>"}
        | {"added_tokens_decoder": added(32000, "<|im_start|>", rstrip=True, special=True)
           | added(32001, "<|im_end|>", special=True) | added(32002, "<tool>", lstrip=True)}
    },
    "eos behind a text": {"added_tokens.json": NEW, "tokenizer_config.json": LLAMA | {"eos_token": "</s>", "add_eos_token": True}},
    "no space before a text": {"added_tokens.json": NEW, "tokenizer_config.json": LLAMA | {"add_prefix_space": False}},
    "a name that is new": {"tokenizer_config.json": LLAMA | {"legacy": False, "pad_token": "[PAD]"}},
}  # fmt: skip


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real vocabularies of ../shared")
@each("name", WITH_TOKENS)
def test_tokens_that_other_files_add_to_the_pieces(name: str, tmp_path: Path) -> None:
    """Read as transformers reads them. It treats double spaces differently from SentencePiece, which trained such
    models."""
    shutil.copy(REAL / "llama2" / "tokenizer.model", tmp_path)
    for file, values in {"config.json": {"model_type": "llama"}, **WITH_TOKENS[name]}.items():
        (tmp_path / file).write_text(json.dumps(values))
    tokenizer, plain = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.size) == (plain.eos_token_id, len(plain))
    turn = "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    for text in (turn, "x<tool> y <tool>z", "a</s> b</s>b", "<unk> x<unk>", "é<tool>é<s>[PAD]x", "no token at all", ""):
        ids = plain.encode(text)
        assert tokenizer.encode(text, add_special_tokens=True) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == plain.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == plain.decode(ids, skip_special_tokens=True)


def test_a_template_of_ones_own_wins(tmp_path: Path) -> None:
    tokenizer = real("llama2", tmp_path, model_type="llama")
    text, ids = tokenizer.encode_messages(conversation("Hi"), "{{ messages[0].content }}!")
    assert (text, ids) == ("Hi!", tokenizer.encode("Hi!", add_special_tokens=False))
    with pytest.raises(UserError, match="the chat template does not take these messages: no"):
        tokenizer.encode_messages(conversation("Hi"), "{{ raise_exception('no') }}")


@each(
    "file, content, config",
    [
        ("tokenizer.model", b"\nnonsense", {"model_type": "llama"}),
        ("tokenizer.model", b"", {"model_type": "baichuan"}),
        ("ice_text.model", b"x", {"model_type": "chatglm"}),
        ("qwen.tiktoken", b"not base64 at all\n", {"model_type": "qwen"}),
        ("qwen.tiktoken", b"IQ==\n", {"model_type": "qwen"}),
        ("qwen.tiktoken", b"IQ== 1\n", {"model_type": "qwen"}),
        ("qwen.tiktoken", b"IQ== 0\nIQ== 1\n", {"model_type": "qwen"}),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, file: str, content: bytes, config: dict[str, str]) -> None:
    (tmp_path / file).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"the tokenizer in {tmp_path} cannot be read: {file}"):
        load_tokenizer(tmp_path)


@each("family, name", [("llama", "LlamaTokenizer"), ("qwen2", "Qwen2Tokenizer")])
def test_settings_without_a_vocabulary_are_refused(family: str, name: str, tmp_path: Path) -> None:
    """transformers would make a tokenizer with only special tokens and ignore all text."""
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UserError, match=f"{tmp_path} has no vocabulary of its {name}: put its tokenizer.json there"):
        load_tokenizer(tmp_path)
