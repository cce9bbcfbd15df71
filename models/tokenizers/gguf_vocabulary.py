"""A tokenizer as what a GGUF file holds of one: tokens with their types, and scores or merges."""

import json
from dataclasses import dataclass, field
from typing import Any

from gguf.constants import TokenType
from sentencepiece import sentencepiece_model_pb2
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from conf.errors import UserError
from models.tokenizers.base import Tokenizer
from models.tokenizers.gguf import GPT2_PATTERN, NORMALISED, PATTERNS, WHOLE_WORDS_FIRST, GGUFSentencePieceTokenizer
from models.tokenizers.huggingface import HuggingFaceTokenizer
from models.tokenizers.sentencepiece import SentencePieceTokenizer

ADDED_SCORE = -1000.0  # of tokens that sentencepiece does not know, as llama.cpp's converter has it


@dataclass
class GGUFVocabulary:
    """The keys of `tokenizer.ggml`, in ggml's docs/gguf.md."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    adds_bos: bool
    chat_template: str | None
    scores: list[float] = field(default_factory=list)
    """For `llama`."""
    merges: list[str] = field(default_factory=list)
    """For `gpt2`."""
    adds_space_prefix: bool = False
    removes_extra_whitespaces: bool = False
    unknown_token_id: int | None = None


def gguf_vocabulary(tokenizer: Tokenizer, size: int) -> GGUFVocabulary:
    """With `size` tokens, as the model has; what the tokenizer lacks are unused ones. Raises UserError for kinds that GGUF has not."""
    if type(tokenizer) is SentencePieceTokenizer or isinstance(tokenizer, GGUFSentencePieceTokenizer):
        return _of_pieces(tokenizer, tokenizer.model_proto, {}, size)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        backend = json.loads(tokenizer.backend.to_str())
        added = {token["id"]: token for token in backend["added_tokens"]}
        if not backend["model"].get("byte_fallback"):
            return _of_pairs(tokenizer, backend, added, size)
        file = tokenizer.source / "tokenizer.model"
        if file.is_file():
            return _of_pieces(tokenizer, file.read_bytes(), added, size)
        raise UserError(
            f"the tokenizer in {tokenizer.source} falls back to bytes, and GGUF needs its scores: put tokenizer.model beside tokenizer.json"
        )
    raise UserError(
        f"the tokenizer in {tokenizer.source} is of a kind that GGUF has not: give a folder with tokenizer.json"
    )


def _of_pieces(tokenizer: Tokenizer, proto: bytes, added: dict[int, dict[str, Any]], size: int) -> GGUFVocabulary:
    model: ModelProto = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(proto)
    if model.trainer_spec.model_type != model.trainer_spec.BPE or model.normalizer_spec.precompiled_charsmap:
        raise UserError(
            f"the tokenizer in {tokenizer.source} is no sentencepiece BPE without normalisation, which GGUF needs"
        )
    tokens = [piece.piece for piece in model.pieces]
    types = [int(piece.type) for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    for id in range(len(tokens), size):
        token = added.get(id)
        tokens.append(token["content"] if token else f"[PAD{id}]")
        types.append(_type_of(token))
        scores.append(ADDED_SCORE)
    unknown = types.index(TokenType.UNKNOWN)
    return GGUFVocabulary(
        "llama",
        "default",
        tokens,
        types,
        _adds_bos(tokenizer),
        tokenizer.chat_template,
        scores=scores,
        adds_space_prefix=model.normalizer_spec.add_dummy_prefix,
        removes_extra_whitespaces=model.normalizer_spec.remove_extra_whitespaces,
        unknown_token_id=unknown,
    )


def _of_pairs(
    tokenizer: HuggingFaceTokenizer, backend: dict[str, Any], added: dict[int, dict[str, Any]], size: int
) -> GGUFVocabulary:
    names = {id: token for token, id in backend["model"]["vocab"].items()}
    names |= {id: token["content"] for id, token in added.items()}
    types = [_type_of(added.get(id)) if id in added or id not in names else int(TokenType.NORMAL) for id in range(size)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in backend["model"]["merges"]]
    return GGUFVocabulary(
        "gpt2",
        _pre(tokenizer, backend),
        [names.get(id, f"[PAD{id}]") for id in range(size)],
        types,
        _adds_bos(tokenizer),
        tokenizer.chat_template,
        merges=merges,
    )


def _type_of(token: dict[str, Any] | None) -> int:
    if token is None:
        return int(TokenType.UNUSED)
    return int(TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED)


def _adds_bos(tokenizer: Tokenizer) -> bool:
    begin = tokenizer.encode("", add_special_tokens=True)
    if begin not in ([], [tokenizer.bos_token_id]):
        raise UserError(
            f"the tokenizer in {tokenizer.source} puts the tokens {begin} around a text: GGUF can say BOS or nothing"
        )
    return bool(begin)


def _pre(tokenizer: HuggingFaceTokenizer, backend: dict[str, Any]) -> str:
    """llama.cpp's name for how this tokenizer cuts a text."""
    steps = backend["pre_tokenizer"] or {}
    cuts: list[str] = []
    for step in steps.get("pretokenizers", [steps]):
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                cuts.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                cuts.append(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
                cuts += [GPT2_PATTERN] if use_regex else []
            case _:
                cuts.append(str(step))
    is_nfc = (backend["normalizer"] or {}).get("type") == "NFC"
    whole_words_first = bool(backend["model"].get("ignore_merges"))
    for pre, patterns in PATTERNS.items():
        if (tuple(cuts), is_nfc, whole_words_first) == (patterns, pre in NORMALISED, pre in WHOLE_WORDS_FIRST):
            return pre
    raise UserError(
        f"the tokenizer in {tokenizer.source} cuts texts in a way that has no name in GGUF here: only that of {', '.join(PATTERNS)}"
    )
