"""Read tokenizer.json and the files next to it as transformers 5 does, without its two seconds of import.

transformers uses the file unchanged, or builds a tokenizer of one of its classes from the file's vocabulary. CLASSES
lists the classes of the families here, FAMILIES the class of each family.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from models.config import read_json
from models.tokenizers.tiktoken import QWEN35_PATTERN, QWEN_PATTERN

FILE = "tokenizer.json"
Settings = dict[str, Any]
"""Keys of tokenizer_config.json."""


@dataclass(frozen=True)
class TokenizerClass:
    """The steps that a transformers class adds to a vocabulary; they override tokenizer.json."""

    set_steps: Callable[[Tokenizer, Settings], None]
    special_tokens: dict[str, str]
    """Special tokens by name, for settings without them."""


def _set_llama_steps(backend: Tokenizer, settings: Settings) -> None:
    has_prefix = settings.get("add_prefix_space") is not False
    scheme = "never" if not has_prefix else "always" if settings.get("legacy", False) else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def _set_gpt2_steps(backend: Tokenizer, settings: Settings) -> None:
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    backend.decoder = decoders.ByteLevel()


def _set_qwen_steps(pattern: str, backend: Tokenizer, settings: Settings) -> None:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")), use_regex=False)
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    backend.decoder = decoders.ByteLevel()


def _set_gemma_steps(backend: Tokenizer, settings: Settings) -> None:
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


END = "<|endoftext|>"
QWEN_TOKENS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), END)
CLASSES = {
    "LlamaTokenizer": TokenizerClass(_set_llama_steps, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}),
    "GPT2Tokenizer": TokenizerClass(_set_gpt2_steps, {"unk_token": END, "bos_token": END, "eos_token": END}),
    "Qwen2Tokenizer": TokenizerClass(partial(_set_qwen_steps, QWEN_PATTERN), QWEN_TOKENS),
    "Qwen3_5Tokenizer": TokenizerClass(partial(_set_qwen_steps, QWEN35_PATTERN), QWEN_TOKENS),
    "GemmaTokenizer": TokenizerClass(
        _set_gemma_steps, {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
    ),
}
AS_IT_STANDS = ("", "PreTrainedTokenizer", "TokenizersBackend", "BloomTokenizer")
"""Classes for which transformers uses the file unchanged."""
FAMILIES = {
    **dict.fromkeys("codegen gpt2 gpt_neo gptj opt phi starcoder2".split(), "GPT2Tokenizer"),
    **dict.fromkeys(
        "qwen2 qwen3 qwen2_moe qwen3_moe qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_next".split(), "Qwen2Tokenizer"
    ),
    **dict.fromkeys("qwen3_5 qwen3_5_moe qwen3_5_text qwen3_5_moe_text".split(), "Qwen3_5Tokenizer"),
    **dict.fromkeys(
        "gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text".split(),
        "GemmaTokenizer",
    ),
    **dict.fromkeys(
        """
        ernie4_5 ernie4_5_moe glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt_bigcode granite granitemoe granitemoehybrid
        granitemoeshared hyperclovax internlm2 internlm3 kimi_k25 kimi_linear llava llava_next minicpm3 minimax
        minimax_m2 ministral ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 phi3 phimoe smolvlm stablelm
        """.split(),
        "",
    ),
}
"""transformers class by `model_type`; "": transformers uses the file unchanged, and ignores the settings."""
OWN_CLASS_WINS = "phi3 qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text".split()
"""Families whose settings name a wrong class on the hub."""
UNREAD = ("auto_map", "fast_tokenizer_files", "split_special_tokens")
"""Settings that only transformers supports."""


def read_tokenizer_json(folder: Path) -> tuple[Tokenizer, dict[str, str]] | None:
    """Return the folder's tokenizer and its special tokens by name (bos_token and so on).

    Returns None if only transformers can read it. Raises the library's exception for a damaged file.
    """
    settings, added = read_settings(folder)
    if not (folder / FILE).is_file() or any(settings.get(name) for name in UNREAD):
        return None
    backend = Tokenizer.from_file(str(folder / FILE))
    name = _class_name(read_json(folder / "config.json"), settings, '"ByteLevel"' in (folder / FILE).read_text("utf-8"))
    kind = CLASSES.get(name)
    if name not in AS_IT_STANDS and (kind is None or not isinstance(backend.model, BPE)):
        return None
    if kind:
        kind.set_steps(backend, settings)
        settings = kind.special_tokens | settings
    backend.add_tokens(list(_additions(backend, settings, added)))
    return backend, {name: token.content for name, token in named_tokens(settings)}


def read_settings(folder: Path) -> tuple[Settings, dict[str, int]]:
    """Return the settings in the files next to the vocabulary, and the ids in added_tokens.json of older folders."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings, {}
    return settings | read_json(folder / "special_tokens_map.json"), read_json(folder / "added_tokens.json")


def _class_name(config: dict[str, Any], settings: Settings, is_byte_level: bool) -> str:
    """Return the class that transformers uses for the file, without the suffix Fast."""
    family = config.get("model_type")
    declared = str(settings.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    if declared == "LlamaTokenizer" and is_byte_level and family not in OWN_CLASS_WINS:
        return ""  # Llama 3 and DeepSeek declare this class, but its steps are Llama 2's
    if family in FAMILIES and (not declared or not FAMILIES[family] or family in OWN_CLASS_WINS):
        return FAMILIES[family]
    return declared


def named_tokens(settings: Settings) -> Iterator[tuple[str, AddedToken]]:
    """Yield names and tokens of settings such as `"bos_token": "<s>"`. A value is a text or an object."""
    extra = settings.get("extra_special_tokens")
    for name, value in (settings | (extra if isinstance(extra, dict) else {})).items():
        is_named = name.endswith("_token") or (isinstance(extra, dict) and name in extra)
        if is_named and isinstance(value, str | dict):
            yield name, _token(value)


def special_tokens(settings: Settings) -> dict[str, AddedToken]:
    """Return the named tokens of settings, and the tokens that they list as special, by text."""
    unnamed = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    tokens = [token for _, token in named_tokens(settings)]
    tokens += map(_token, [] if isinstance(unnamed, dict) else unnamed)
    return {token.content: token for token in tokens}


def _additions(backend: Tokenizer, settings: Settings, added: dict[str, int]) -> Iterator[AddedToken]:
    """Yield the tokens that the files next to tokenizer.json add or change."""
    specials = special_tokens(settings)
    present = backend.get_added_tokens_decoder()
    by_id = {int(id): AddedToken(**token) for id, token in settings.get("added_tokens_decoder", {}).items()}
    for content, id in added.items():
        if id not in present:
            by_id[id] = AddedToken(content, normalized=content not in specials, special=content in specials)
    as_they_are = {repr(token) for token in present.values()}
    new = [token for _, token in sorted(by_id.items()) if repr(token) not in as_they_are]
    yield from new
    listed = {token.content: token for token in [*present.values(), *new]}
    for content, token in specials.items():
        if content not in listed:
            yield token
        elif not listed[content].special:  # a named token is always special
            listed[content].special = True
            yield listed[content]


def _token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {name: flag for name, flag in value.items() if name not in ("__type", "special")}
    return AddedToken(**flags, special=True)
