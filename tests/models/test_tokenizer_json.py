"""tokenizer.json read without transformers: the same ids, texts and special tokens as transformers', for every
spelling."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, GPT2Tokenizer

from conf.errors import UserError
from models.formats.wrapper import TEXT_MODELS
from models.registry import ARCHITECTURES
from models.tokenizers import Tokenizer, load_tokenizer
from models.tokenizers.tiktoken import LLAMA3_PATTERN
from models.tokenizers.tokenizer_json import OWN_CLASS_WINS
from tests.helpers.builders import SHARED
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import TEXTS, TRICKY, byte_fallback, byte_level

SAMPLES = [*TEXTS, TRICKY, "", " ", "a", "<s>[INST] hi [/INST] there</s>", "x<tool>y</s> z <s>", "cafe\u0301", "▁x"]
MARKS = "हिन्दी की 12 बातें, ไม่มี q\u0301a"
TOKEN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def llama3_like() -> Backend:
    backend = byte_level()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    return backend


def gemma_like() -> Backend:
    backend = byte_fallback()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def cut_and_padded() -> Backend:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=9, pad_id=1, pad_token="</s>")
    return backend


def with_plain_end() -> Backend:
    """Return settings that name an added token which tokenizer.json does not call special."""
    backend = byte_level()
    text = json.loads(backend.to_str())
    for token in text["added_tokens"]:
        token["special"] &= token["content"] != "</s>"
        token["rstrip"] = token["content"] == "</s>"
    return Backend.from_str(json.dumps(text))


BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", **BOTH, "unk_token": "<unk>"}
FOLDERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # tokenizer.json, tokenizer_config.json, config.json, other files
    "as it stands": (byte_level, {"tokenizer_class": "PreTrainedTokenizerFast", **BOTH}, {"model_type": "llama"}, {}),
    "no settings": (byte_level, {}, {"model_type": "llama"}, {}),
    "a named token that is not special": (
        with_plain_end,
        {"tokenizer_class": "PreTrainedTokenizerFast", **BOTH},
        {"model_type": "llama"},
        {},
    ),
    "no config": (byte_level, {"tokenizer_class": "PreTrainedTokenizerFast", **BOTH}, {}, {}),
    "cut and padded": (
        cut_and_padded,
        {"tokenizer_class": "PreTrainedTokenizerFast", **BOTH, "pad_token": "</s>"},
        {},
        {},
    ),
    "flags that the file overrides": (byte_level, {**LLAMA, "add_bos_token": False, "add_eos_token": True}, {}, {}),
    "llama 2": (byte_fallback, LLAMA, {"model_type": "llama"}, {}),
    "llama 2, legacy": (byte_fallback, {**LLAMA, "legacy": True}, {"model_type": "llama"}, {}),
    "llama 2, no prefix": (byte_fallback, {**LLAMA, "add_prefix_space": False}, {"model_type": "llama"}, {}),
    "llama 2, Fast": (byte_fallback, {**LLAMA, "tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "llama"}, {}),
    "class in config.json": (byte_fallback, BOTH, {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}, {}),
    "llama 3 under llama 2's class": (llama3_like, LLAMA, {"model_type": "llama"}, {}),
    "deepseek": (llama3_like, {**LLAMA, "tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "deepseek_v3"}, {}),
    "mistral": (byte_fallback, LLAMA, {"model_type": "mistral"}, {}),
    "mixtral": (byte_fallback, {**LLAMA, "legacy": True}, {"model_type": "mixtral"}, {}),
    "phi 3": (byte_fallback, {**LLAMA, "legacy": False}, {"model_type": "phi3"}, {}),
    "qwen 2": (llama3_like, {"tokenizer_class": "Qwen2Tokenizer", **BOTH}, {"model_type": "qwen2"}, {}),
    "qwen 2 by family": (llama3_like, {**BOTH, "bos_token": None}, {"model_type": "qwen2"}, {}),
    "qwen 2, generic class": (
        llama3_like,
        {"tokenizer_class": "PreTrainedTokenizerFast", **BOTH},
        {"model_type": "qwen2"},
        {},
    ),
    "qwen 3, generic class": (
        llama3_like,
        {"tokenizer_class": "PreTrainedTokenizerFast", **BOTH},
        {"model_type": "qwen3"},
        {},
    ),
    "gpt 2": (byte_level, {"tokenizer_class": "GPT2Tokenizer", **BOTH}, {"model_type": "gpt2"}, {}),
    "gpt 2, prefix": (byte_level, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, **BOTH}, {}, {}),
    "opt": (byte_level, {"tokenizer_class": "GPT2Tokenizer", **BOTH}, {"model_type": "opt"}, {}),
    "gemma 2": (gemma_like, {"tokenizer_class": "GemmaTokenizer", **BOTH}, {"model_type": "gemma2"}, {}),
    "gemma 3": (gemma_like, {"tokenizer_class": "GemmaTokenizer", **BOTH}, {"model_type": "gemma3_text"}, {}),
    "gemma 3 with pictures": (gemma_like, {"tokenizer_class": "GemmaTokenizer", **BOTH}, {"model_type": "gemma3"}, {}),
    "bloom": (byte_level, {"tokenizer_class": "BloomTokenizerFast", **BOTH}, {"model_type": "bloom"}, {}),
    "glm 4": (byte_level, {"tokenizer_class": "PreTrainedTokenizerFast", **BOTH}, {"model_type": "glm4"}, {}),
    "glm": (byte_level, {"tokenizer_class": "ChatGLM4Tokenizer", **BOTH}, {"model_type": "glm"}, {}),
    "added tokens in the settings": (
        byte_level,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": {"__type": "AddedToken", "content": "<s>", **TOKEN},
            "eos_token": "<end>",
            "additional_special_tokens": ["<tool>"],
            "added_tokens_decoder": {
                "0": {"content": "<s>", **TOKEN, "special": True},
                "331": {"content": "<end>", **TOKEN, "special": True},
                "330": {"content": "[INST]", **TOKEN, "special": False},
            },
        },
        {"model_type": "llama"},
        {},
    ),
    "special tokens in files of their own": (
        byte_level,
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "</s>"},
        {"model_type": "llama"},
        {
            "special_tokens_map.json": {"bos_token": {"content": "<s>", **TOKEN}, "eos_token": "<end>"},
            "added_tokens.json": {"<end>": 330, "<tool>": 331},
        },
    ),
    "a special token that is new": (
        byte_level,
        {"tokenizer_class": "PreTrainedTokenizerFast", **BOTH, "pad_token": "<pad>", "image_token": "<tool>"},
        {"model_type": "llama"},
        {},
    ),
}


def written(folder: Path, name: str) -> Tokenizer:
    backend, settings, config, others = FOLDERS[name]
    backend().save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config.json": settings, "config.json": config, **others}
    for file, values in files.items():
        if values:
            (folder / file).write_text(json.dumps(values))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@each("name", FOLDERS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    ours = written(tmp_path, name)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in SAMPLES:
        for add in (False, True):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs(text, add_special_tokens=add)["input_ids"]
            for skip in (False, True):
                assert ours.decode(ids, skip) == theirs.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.size == max(theirs.get_vocab().values()) + 1
    assert dict(ours.special_tokens) == theirs.special_tokens_map


OF_FAMILIES = [
    (family, declared)
    for family in sorted({*ARCHITECTURES, *TEXT_MODELS, "minimax"})
    for declared in ("GPT2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast")
    if declared != "LlamaTokenizer" or family not in {*OWN_CLASS_WINS} - {"phi3"}  # Qwen's have no steps for pieces
]


@each(
    "family, declared", OF_FAMILIES, quick=[case for case in OF_FAMILIES if case[0] in ("minimax", "olmo2", "qwen3_5")]
)
def test_families_have_the_class_of_transformers(family: str, declared: str, tmp_path: Path) -> None:
    """Hub files of OLMo, Granite, MiniMax-M2 and other families declare a class that splits texts differently from
    their tokenizer.json."""
    backend = gemma_like() if declared == "LlamaTokenizer" else llama3_like()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": declared, **BOTH}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    known = "minimax_m2" if family == "minimax" else family  # the name in that model's first files
    (tmp_path / "config.json").write_text(json.dumps({"model_type": known}))
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in SAMPLES:
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"], text
    if splits := theirs.backend_tokenizer.pre_tokenizer:  # small vocabularies merge nothing across marks
        assert ours.backend.pre_tokenizer.pre_tokenize_str(MARKS) == splits.pre_tokenize_str(MARKS)


@pytest.mark.long
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real vocabularies of ../shared")
@each("name", ["qwen2", "gpt2", "llama2"])
def test_real_vocabularies(name: str, tmp_path: Path) -> None:
    """As transformers saves them, on the texts of the published vectors."""
    source = SHARED / "data" / "tokenizers" / name
    if name == "gpt2":  # its folder has no settings
        theirs: Any = GPT2Tokenizer(str(source / "vocab.json"), str(source / "merges.txt"))
    else:
        theirs = AutoTokenizer.from_pretrained(source)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    for case in json.loads((source / "vectors.json").read_text(encoding="utf-8"))["cases"]:
        ids = ours.encode(case["text"], add_special_tokens=True)
        assert ids == theirs(case["text"])["input_ids"]
        assert ours.decode(ids, False) == theirs.backend_tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models of ../shared")
@each("name", ["stories260K", "babyllama_tok105"])
def test_real_models(name: str) -> None:
    folder = SHARED / "data" / "models" / name
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert ours is not None
    for text in SAMPLES:
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"]


CHAT = [
    {"role": "system", "content": "be brief", "extra": None},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?", "reasoning": "greeting"},
    {"role": "user", "content": "<&> \u00e9", "tools": [{"name": "f", "arguments": {"b": 1, "a": [None, True]}}]},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n{% endif %}\n{% endfor %}!",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{{ messages[3] | tojson(indent=2) }}{{ messages[3].tools | tojson(sort_keys=true) }}",
    "{% set ns = namespace(found=false, self=1) %}{% for m in messages %}{% set ns.found = true %}{% endfor %}{{ ns.found }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages[2].reasoning_content }}{{ messages[2].thinking }}{{ 'extra' in messages[0] }}{{ tools is none }}",
    "{{ dict(a=1).items() | list }}{{ dict.fromkeys('ab') }}{{ strftime_now('%Y') }}{{ add_generation_prompt }}{{ eos_token }}",
    "{{ unknown_token is defined }}{{ documents }}{{ pad_token | default('none') }}",
]


@each("template", TEMPLATES)
def test_templates_give_the_text_of_transformers(template: str, tmp_path: Path) -> None:
    written(tmp_path, "as it stands")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert ours is not None
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert ours.encode_messages(CHAT, None) == (expected, ours.encode(expected, add_special_tokens=False))
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    assert load_tokenizer(tmp_path).encode_messages(CHAT, None)[0] == "4"  # type: ignore[union-attr]


@each(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ strftime_now.__globals__.sys }}",
        "{{ messages.clear() }}",
        "{{ messages.append.__class__.__mro__ }}",
        "{{ messages[0].update(a=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format(messages).x.y }}",
        "{{ messages | map(attribute='__class__') | list | first.__mro__ }}",
        "{{ messages[0].tools.read() }}",
    ],
)
def test_a_template_does_not_leave_the_sandbox(template: str, tmp_path: Path) -> None:
    tokenizer = written(tmp_path, "as it stands")
    with (
        open(tmp_path / "config.json") as opened,
        pytest.raises(UserError, match="the chat template does not take these messages"),
    ):
        tokenizer.encode_messages([{"role": "user", "content": "hi", "tools": opened}], template)


def test_merges_that_are_dropped_at_random_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dropout, is_told in ((None, False), (0.0, False), (0.3, True)):
        backend = byte_level()
        backend.model.dropout = dropout
        backend.save(str(tmp_path / "tokenizer.json"))
        caplog.clear()
        load_tokenizer(tmp_path)
        assert ("drops merges at random (dropout=0.3 of its tokenizer.json)" in caplog.text) == is_told
