"""Load the tokenizer in a GGUF file: a sentencepiece vocabulary with scores (`llama`), or BPE of bytes (`gpt2`) or of
characters (`gemma4`).

Keys are from ggml's docs/gguf.md. llama.cpp's defaults apply if a file does not say whether BOS comes first or how to
split texts.
"""

import json
import math
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from conf.errors import UserError
from models.formats.gguf.header import GGUFHeader
from models.formats.gguf.pre_tokenizers import GEMMA4, PRE_TOKENIZERS, PreTokenizer
from models.formats.gguf.special_tokens import LIST, SPACE, SPACES_BEHIND_SPECIAL, SpecialTokens
from models.tokenizers.base import Tokenizer
from models.tokenizers.huggingface import HuggingFaceTokenizer, damage_refused
from models.tokenizers.sentencepiece import SentencePieceTokenizer

TEMPLATE = "tokenizer.chat_template"


def load_gguf_tokenizer(header: GGUFHeader) -> Tokenizer | None:
    """Return the file's tokenizer, or None if there is none.

    Raises UserError for a damaged vocabulary or an unknown kind.
    """
    read = header.section("tokenizer.ggml")
    kind = read.raw("model")
    if kind in ("none", "no_vocab", None):
        return None
    if kind not in ("llama", "gpt2", "gemma4"):
        raise header.unsupported(f"tokenizer.ggml: model={kind!r:.80} is not supported: only 'llama', 'gpt2', 'gemma4'")
    read.expect("add_eos_token", (None, False), None)
    return GGUFSentencePieceTokenizer(header) if kind == "llama" else GGUFBytePairTokenizer(header)


class GGUFSentencePieceTokenizer(SentencePieceTokenizer):
    """Llama's sentencepiece tokenizer, made from pieces and scores."""

    def __init__(self, header: GGUFHeader) -> None:
        tokens = SpecialTokens(header)
        super().__init__(header.path, _sentencepiece_model(header, tokens))
        self.add_tokens(tokens.added())
        self.source = header.path
        self._is_legacy = header.scalars.get(SPACES_BEHIND_SPECIAL) is not False
        self.bos_token_id, self.eos_token_id, self.turn_end_ids = tokens.bos, tokens.eos, tokens.ends
        self.special_tokens = tokens.by_name()
        self._adds_bos = header.section("tokenizer.ggml").get("add_bos_token", bool, True)
        self.take_templates(_chat_templates(header))  # the vocabulary kind does not show the family

    def save(self, folder: Path) -> None:
        settings = {"tokenizer_class": "LlamaTokenizer", "legacy": self._is_legacy, "add_bos_token": self._adds_bos}
        settings |= {"added_tokens_decoder": {id: _flags(token) for id, token in self.added_tokens.items()}}
        settings |= {**self.special_tokens, **self.named_templates}
        (folder / "tokenizer.model").write_bytes(self.model_proto)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class GGUFBytePairTokenizer(HuggingFaceTokenizer):
    """A BPE tokenizer, made from tokens and merges.

    A byte without a token is skipped, as in llama.cpp and `tokenizers`.
    """

    def __init__(self, header: GGUFHeader) -> None:
        read, tokens = header.section("tokenizer.ggml"), SpecialTokens(header)
        pre = GEMMA4 if read.raw("model") == "gemma4" else _pre_tokenizer(header, read.raw("pre"))
        with damage_refused(header.path):
            backend = _byte_pairs(header, tokens, pre, read.get("add_bos_token", bool, pre.adds_bos))
        super().__init__(header.path, backend, tokens.by_name())
        self.take_templates(_chat_templates(header))
        self.bos_token_id, self.eos_token_id, self.turn_end_ids = tokens.bos, tokens.eos, tokens.ends


def _pre_tokenizer(header: GGUFHeader, name: Any) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(map(repr, PRE_TOKENIZERS))
        raise header.unsupported(f"tokenizer.ggml: pre={name!r:.80} is not supported: only {supported}")
    return PRE_TOKENIZERS[name]


def _sentencepiece_model(header: GGUFHeader, special: SpecialTokens) -> bytes:
    tokens, types = special.texts, special.types
    scores = header.numbers("tokenizer.ggml.scores", "f", len(tokens))
    if not all(map(math.isfinite, scores)):
        raise UserError(f"{header.path}: tokenizer.ggml.scores holds a number that is not finite")
    if tokens:  # sentencepiece needs one unknown token; Phi-3's own is control, and its 53 padding tokens are unknown
        unknown = special.id("unknown")
        types = [TokenType.UNUSED if kind == TokenType.UNKNOWN else kind for kind in types]
        first = special.types.index(TokenType.UNKNOWN) if TokenType.UNKNOWN in special.types else 0
        types[first if unknown is None else unknown] = TokenType.UNKNOWN
    read = header.section("tokenizer.ggml")
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        # llama.cpp's converter writes user-defined pieces with spaces.
        piece = token.replace(" ", SPACE) if kind == TokenType.USER_DEFINED else token
        model.pieces.add(piece=piece, score=score, type=kind)
    for name, id in (("bos", special.bos), ("eos", special.eos)):
        setattr(model.trainer_spec, f"{name}_id", -1 if id is None else id)
        setattr(model.trainer_spec, f"{name}_piece", tokens[id] if id is not None else f"<no {name}>")
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = TokenType.BYTE in types
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = read.get("add_space_prefix", bool, True)
    model.normalizer_spec.remove_extra_whitespaces = read.get("remove_extra_whitespaces", bool, False)
    return bytes(model.SerializeToString())


def _byte_pairs(header: GGUFHeader, special: SpecialTokens, pre: PreTokenizer, adds_bos: bool) -> Backend:
    tokens, types = special.texts, special.types
    used = [(i, token) for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED]  # unused tokens are padding
    ids = {token: i for i, token in used}
    if len(ids) != len(used):
        duplicate = next(token for i, token in used if ids[token] != i)
        raise UserError(f"{header.path}: {LIST} has {duplicate[:80]!r} twice")
    merges = [_merge(header, pair, ids) for pair in header.texts("tokenizer.ggml.merges")]
    falls_back = not pre.is_byte_level
    model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words_first, byte_fallback=falls_back)
    backend = Backend(model)
    cuts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    if pre.is_byte_level:
        if pre.is_nfc:
            backend.normalizer = normalizers.NFC()
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.decoder = decoders.ByteLevel()
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE)
        backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    added = list(special.added().values())
    backend.add_tokens(added)
    texts = {token.content for token in added}
    backend.add_special_tokens([token for token in special.by_name().values() if token not in texts])
    if adds_bos and special.bos is not None:
        bos = tokens[special.bos]
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, special.bos)])
    return backend


def _flags(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def _merge(header: GGUFHeader, pair: str, ids: dict[str, int]) -> tuple[str, str]:
    left, _, right = pair.partition(" ")
    if not all(part in ids for part in (left, right, left + right)):
        raise UserError(
            f"{header.path}: tokenizer.ggml.merges has {pair[:80]!r}, which does not join tokens to a token"
        )
    return left, right


def _chat_templates(header: GGUFHeader) -> dict[str, str]:
    """Return the chat templates by name.

    The key of the default template is tokenizer.chat_template, of another tokenizer.chat_template.NAME.
    """
    templates: dict[str, str] = {}
    for key, value in header.scalars.items():
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}."):
            if not isinstance(value, str):
                raise UserError(f"{header.path}: {key}={value!r} is not a text")
            templates[key.removeprefix(TEMPLATE).removeprefix(".") or "default"] = value
    return {name: text for name, text in templates.items() if text}
