"""The tokenizer inside a GGUF file: a sentencepiece vocabulary with scores (`llama`), or byte-level pairs with merges (`gpt2`).

Keys: ggml's docs/gguf.md. Where a file does not say whether BOS comes first or how a text is split, llama.cpp's rule holds.
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
from models.formats.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from models.tokenizers.base import Tokenizer
from models.tokenizers.huggingface import HuggingFaceTokenizer, damage_refused
from models.tokenizers.sentencepiece import SentencePieceTokenizer

LIST = "tokenizer.ggml.tokens"


def load_gguf_tokenizer(header: GGUFHeader) -> Tokenizer | None:
    """Return the file's tokenizer, or None where it has none. Raises UserError for a damaged vocabulary or an unknown kind."""
    read = header.section("tokenizer.ggml")
    kind = read.raw("model")
    if kind in ("none", "no_vocab", None):
        return None
    if kind not in ("llama", "gpt2"):
        raise header.unsupported(f"tokenizer.ggml: model={kind!r:.80} is not supported: only 'llama', 'gpt2'")
    read.expect("add_eos_token", (None, False), None)
    return GGUFSentencePieceTokenizer(header) if kind == "llama" else GGUFBytePairTokenizer(header)


class GGUFSentencePieceTokenizer(SentencePieceTokenizer):
    """Llama's tokenizer, by pieces and scores."""

    def __init__(self, header: GGUFHeader) -> None:
        super().__init__(header.path, _sentencepiece_model(header))
        read = header.section("tokenizer.ggml")
        self.source = header.path
        self.bos_token_id, self.eos_token_id = _token_id(header, "bos"), _token_id(header, "eos")
        self.special_tokens = _special_tokens(header)
        self._adds_bos = read.get("add_bos_token", bool, True)
        self.chat_template = _chat_template(header)  # many families share this kind of vocabulary

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return super().encode(text, add_special_tokens and self._adds_bos)

    def save(self, folder: Path) -> None:
        settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": self._adds_bos, **self.special_tokens}
        settings |= {"chat_template": self.chat_template} if self.chat_template else {}
        (folder / "tokenizer.model").write_bytes(self.model_proto)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class GGUFBytePairTokenizer(HuggingFaceTokenizer):
    """A byte-level tokenizer, by tokens and merges."""

    def __init__(self, header: GGUFHeader) -> None:
        read = header.section("tokenizer.ggml")
        if (name := read.raw("pre")) not in PRE_TOKENIZERS:
            supported = ", ".join(map(repr, PRE_TOKENIZERS))
            raise header.unsupported(f"tokenizer.ggml: pre={name!r:.80} is not supported: only {supported}")
        pre = PRE_TOKENIZERS[name]
        with damage_refused(header.path):
            backend = _byte_pairs(header, pre, read.get("add_bos_token", bool, pre.adds_bos))
        super().__init__(header.path, backend, _special_tokens(header), _chat_template(header))
        self.bos_token_id, self.eos_token_id = _token_id(header, "bos"), _token_id(header, "eos")


def _sentencepiece_model(header: GGUFHeader) -> bytes:
    tokens = header.texts(LIST)
    scores = header.numbers("tokenizer.ggml.scores", "f", len(tokens))
    types = header.numbers("tokenizer.ggml.token_type", "i", len(tokens))
    if not all(map(math.isfinite, scores)):
        raise UserError(f"{header.path}: tokenizer.ggml.scores holds a number that is not finite")
    if wrong := set(types) - set(TokenType):
        raise UserError(f"{header.path}: tokenizer.ggml.token_type holds {min(wrong)}, expected 1 to {max(TokenType)}")
    if tokens:  # sentencepiece has exactly one that is unknown; Phi-3 calls its own a control token, and 53 that pad the list unknown
        unknown = _token_id(header, "unknown")
        first = types.index(TokenType.UNKNOWN) if TokenType.UNKNOWN in types else 0
        types = [TokenType.UNUSED if kind == TokenType.UNKNOWN else kind for kind in types]
        types[first if unknown is None else unknown] = TokenType.UNKNOWN
    read = header.section("tokenizer.ggml")
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    for name, id in (("bos", _token_id(header, "bos")), ("eos", _token_id(header, "eos"))):
        setattr(model.trainer_spec, f"{name}_id", -1 if id is None else id)
        setattr(model.trainer_spec, f"{name}_piece", tokens[id] if id is not None else f"<no {name}>")
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = TokenType.BYTE in types
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = read.get("add_space_prefix", bool, True)
    model.normalizer_spec.remove_extra_whitespaces = read.get("remove_extra_whitespaces", bool, False)
    return bytes(model.SerializeToString())


def _byte_pairs(header: GGUFHeader, pre: PreTokenizer, adds_bos: bool) -> Backend:
    tokens, pairs = header.texts(LIST), header.texts("tokenizer.ggml.merges")
    types = header.numbers("tokenizer.ggml.token_type", "i", len(tokens))
    used = [(i, token) for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED]  # others pad the list
    ids = {token: i for i, token in used}
    if len(ids) != len(used):
        twice = next(token for i, token in used if ids[token] != i)
        raise UserError(f"{header.path}: {LIST} has {twice[:80]!r} twice")
    if missing := [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in ids]:
        raise UserError(f"{header.path}: {LIST} lacks {len(missing)} of the 256 bytes, {missing[0]!r} first")
    merges = [_merge(header, pair, ids) for pair in pairs]
    backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words_first))
    if pre.is_nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    kinds = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    added = {
        token: AddedToken(token, special=kinds[TokenType(kind)], normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds and token
    }
    backend.add_tokens(list(added.values()))
    backend.add_special_tokens([token for token in _special_tokens(header).values() if token not in added])
    bos = _token_id(header, "bos")
    if adds_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )
    return backend


def _merge(header: GGUFHeader, pair: str, ids: dict[str, int]) -> tuple[str, str]:
    left, _, right = pair.partition(" ")
    if not all(part in ids for part in (left, right, left + right)):
        raise UserError(
            f"{header.path}: tokenizer.ggml.merges has {pair[:80]!r}, which does not join tokens to a token"
        )
    return left, right


def _token_id(header: GGUFHeader, name: str) -> int | None:
    id = header.section("tokenizer.ggml").get(f"{name}_token_id", int, -1)
    if id == -1 or id == 2**32 - 1:  # llama.cpp's way to say none
        return None
    size = len(header.texts(LIST))
    if not 0 <= id < size:
        raise UserError(f"{header.path}: tokenizer.ggml.{name}_token_id={id} is none of the {size} tokens")
    return id


def _special_tokens(header: GGUFHeader) -> dict[str, str]:
    ids = {f"{name}_token": _token_id(header, name) for name in ("bos", "eos")}
    return {name: header.texts(LIST)[id] for name, id in ids.items() if id is not None}


def _chat_template(header: GGUFHeader) -> str | None:
    value: Any = header.scalars.get("tokenizer.chat_template")
    if value is not None and not isinstance(value, str):
        raise UserError(f"{header.path}: tokenizer.chat_template={value!r} is not a text")
    return value or None
