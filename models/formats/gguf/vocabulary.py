"""Convert a tokenizer to a GGUF vocabulary: tokens with types, and scores or merges."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import TokenType
from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, pre_tokenizers

from conf.errors import UserError
from models.formats.gguf.header import GGUFHeader
from models.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from models.formats.gguf.special_tokens import SPACE
from models.formats.gguf.tokenizer import GGUFSentencePieceTokenizer, load_gguf_tokenizer
from models.tokenizers.base import Tokenizer
from models.tokenizers.huggingface import HuggingFaceTokenizer
from models.tokenizers.runner_form import GPT2_PATTERN
from models.tokenizers.sentencepiece import ChatGLM2Tokenizer, SentencePieceTokenizer
from models.tokenizers.tiktoken import QwenTokenizer
from models.tokenizers.token_decoder import BYTE_LETTERS

log = logging.getLogger(__name__)

ADDED_SCORE = -1000.0  # for tokens that sentencepiece does not have, as in llama.cpp's converter
PROBES = (
    "a",
    " a",
    "  a",
    "a  b",
    "a ",
    " ",
    "\n a",
    "\ta",
    "It's 12 o'clock, isn't it?",
    "'tis",
    "é ü",
    "今天很好",
    "🙂",
)


@dataclass
class GGUFVocabulary:
    """The keys `tokenizer.ggml.*` of ggml's docs/gguf.md."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    adds_bos: bool
    chat_template: str | list[dict[str, str]] | None
    """One template, or several with the keys `name` and `template`."""
    scores: list[float] = field(default_factory=list)
    """Score of each token, for model `llama`."""
    merges: list[str] = field(default_factory=list)
    """Merges in order, for model `gpt2`."""
    adds_space_prefix: bool = False
    removes_extra_whitespaces: bool = False
    unknown_token_id: int | None = None
    spaces_behind_special: bool = True
    """Whether the space prefix also follows special tokens, as in llama.cpp. GGUF itself has no key for this."""


def gguf_vocabulary(tokenizer: Tokenizer, size: int) -> GGUFVocabulary:
    """Return a vocabulary of `size` tokens, the model's vocabulary size. Padding tokens are marked unused.

    Warns if a reader of the file will tokenize texts differently. Raises UserError for tokenizer kinds that GGUF does
    not support.
    """
    vocabulary = _vocabulary(tokenizer, size)
    _warn_of_differences(tokenizer, vocabulary)
    return vocabulary


def _warn_of_differences(tokenizer: Tokenizer, vocabulary: GGUFVocabulary) -> None:
    read_back = load_gguf_tokenizer(_header(tokenizer.source, vocabulary))
    assert read_back is not None
    control = [
        text for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.CONTROL
    ]
    probes = [*PROBES, *(f"{text}a" for text in control[-1:])]
    changed = [repr(text) for text in probes if read_back.encode(text, False) != tokenizer.encode(text, False)]
    known, letters = set(vocabulary.tokens), pre_tokenizers.ByteLevel.alphabet()
    num_missing = sum(f"<0x{byte:02X}>" not in known for byte in range(256))
    num_letters = sum(letter not in known for letter in letters)
    faults = {
        f"it has rules that GGUF cannot express, so texts such as {', '.join(changed[:3])} get other tokens": bool(
            changed
        ),
        "it begins a text with [gMASK] sop, which a caller must write": isinstance(tokenizer, ChatGLM2Tokenizer),
        "it removes leading and repeated spaces, which llama.cpp keeps": vocabulary.removes_extra_whitespaces,
        "it normalises texts to Unicode NFC, which llama.cpp does not": vocabulary.model == "gpt2"
        and PRE_TOKENIZERS[vocabulary.pre].is_nfc,
        f"it has {tokenizer.size} tokens, and the model {len(vocabulary.tokens)}: the excess tokens are left out": (
            tokenizer.size > len(vocabulary.tokens)
        ),
        f"it lacks {num_missing} of the 256 bytes, and llama.cpp fails at a character without a token": (
            vocabulary.model == "llama" and num_missing > 0
        ),
        f"it lacks {num_letters} of the 256 bytes, and some programs reject the file": (
            vocabulary.model == "gpt2" and num_letters > 0
        ),
    }
    for fault, is_so in faults.items():
        if is_so:
            log.warning("the tokenizer in %s changes in GGUF: %s", tokenizer.source, fault)


def _header(source: Path, vocabulary: GGUFVocabulary) -> GGUFHeader:
    scalars = {
        "model": vocabulary.model,
        "pre": vocabulary.pre,
        "add_bos_token": False,
        "add_space_prefix": vocabulary.adds_space_prefix,
        "remove_extra_whitespaces": vocabulary.removes_extra_whitespaces,
        "unknown_token_id": vocabulary.unknown_token_id,
    }
    arrays: dict[str, list[str] | NDArray[Any]] = {
        "tokens": vocabulary.tokens,
        "token_type": np.array(vocabulary.types),
        "scores": np.array(vocabulary.scores),
        "merges": vocabulary.merges,
    }
    prefix = "tokenizer.ggml."
    return GGUFHeader(
        source,
        {prefix + key: value for key, value in scalars.items()},
        {prefix + key: value for key, value in arrays.items()},
        {},
    )


def _vocabulary(tokenizer: Tokenizer, size: int) -> GGUFVocabulary:
    if isinstance(tokenizer, QwenTokenizer):
        return _from_tiktoken(tokenizer, size)
    if type(tokenizer) is SentencePieceTokenizer or isinstance(
        tokenizer, GGUFSentencePieceTokenizer | ChatGLM2Tokenizer
    ):
        return _from_sentencepiece(tokenizer, tokenizer.model_proto, tokenizer.added_tokens, size)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        backend = json.loads(tokenizer.backend.to_str())
        added = tokenizer.backend.get_added_tokens_decoder()
        if not backend["model"].get("byte_fallback"):
            tokens = {id: token for token, id in backend["model"]["vocab"].items()}
            merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in backend["model"]["merges"]]
            return _from_bpe(tokenizer, _pre_tokenizer_name(tokenizer, backend), tokens, merges, added, size)
        file = tokenizer.source / "tokenizer.model"
        if file.is_file():
            return _from_sentencepiece(tokenizer, file.read_bytes(), added, size)
        raise UserError(
            f"the tokenizer in {tokenizer.source} falls back to bytes, for which GGUF needs scores: "
            "put tokenizer.model next to tokenizer.json"
        )
    raise UserError(
        f"the tokenizer in {tokenizer.source} is of a kind that GGUF does not support: give a folder with tokenizer.json"
    )


def _from_sentencepiece(
    tokenizer: Tokenizer, proto: bytes, added: Mapping[int, AddedToken], size: int
) -> GGUFVocabulary:
    model: ModelProto = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(proto)
    if model.trainer_spec.model_type != model.trainer_spec.BPE or model.normalizer_spec.precompiled_charsmap:
        raise UserError(
            f"the tokenizer in {tokenizer.source} is not a sentencepiece BPE without normalisation, which GGUF needs"
        )
    pieces = model.pieces[:size]
    num_padding = size - len(pieces)
    tokens = [piece.piece for piece in pieces] + [f"[PAD{id}]" for id in range(len(pieces), size)]
    types = [int(piece.type) for piece in pieces] + [int(TokenType.UNUSED)] * num_padding
    scores = [piece.score for piece in pieces] + [ADDED_SCORE] * num_padding
    unknown = types.index(TokenType.UNKNOWN)
    for id, token in added.items():
        if id < size:
            tokens[id], types[id] = token.content, _type_of(token)
    types[unknown] = int(TokenType.UNKNOWN)
    for id, kind in enumerate(types):
        if kind == TokenType.USER_DEFINED:
            tokens[id] = tokens[id].replace(SPACE, " ")  # as llama.cpp's converter does
    return GGUFVocabulary(
        "llama",
        "default",
        tokens,
        types,
        _adds_bos(tokenizer),
        tokenizer.named_templates.get("chat_template"),
        scores=scores,
        # Tested with the tokenizer, because tokenizer.json may treat spaces differently from tokenizer.model.
        adds_space_prefix=any(tokens[id].startswith(SPACE) for id in tokenizer.encode("a", False)[:1]),
        removes_extra_whitespaces=tokenizer.encode("a  a", False) == tokenizer.encode("a a", False),
        unknown_token_id=unknown,
        spaces_behind_special=all(
            tokenizer.encode(f"{token.content}a", False)[1:] == tokenizer.encode("a", False)
            for id, token in list(added.items())[-1:]
            if tokenizer.encode(token.content, False) == [id]
        ),
    )


def _from_tiktoken(tokenizer: QwenTokenizer, size: int) -> GGUFVocabulary:
    tokens = {rank: "".join(BYTE_LETTERS[byte] for byte in token) for token, rank in tokenizer.ranks.items()}
    parts = (_last_parts(token, tokenizer) for token in sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__))
    merges = [" ".join(tokens[tokenizer.ranks[part]] for part in pair) for pair in parts if len(pair) == 2]
    return _from_bpe(tokenizer, "qwen2", tokens, merges, tokenizer.added_tokens, size)


def _last_parts(token: bytes, tokenizer: QwenTokenizer) -> list[bytes]:
    """Return the two parts that the token's last merge joins; its byte if it has only one.

    Raises UserError if no merge of two tokens makes it.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        ranks = [tokenizer.ranks.get(left + right, tokenizer.size) for left, right in pairwise(parts)]
        first = min(range(len(ranks)), key=ranks.__getitem__)
        if ranks[first] >= tokenizer.ranks[token]:
            raise UserError(
                f"the tokenizer in {tokenizer.source} has {token!r}, which no merge of two tokens gives: GGUF needs such a merge"
            )
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


def _from_bpe(
    tokenizer: Tokenizer,
    pre: str,
    tokens: Mapping[int, str],
    merges: list[str],
    added: Mapping[int, AddedToken],
    size: int,
) -> GGUFVocabulary:
    """Return the vocabulary of a BPE tokenizer.

    `tokens`: texts in GPT-2's byte letters, by id. `merges`: two such texts each, in order.
    """
    names = {**tokens, **{id: token.content for id, token in added.items()}}
    types = [_type_of(added.get(id)) if id in added or id not in names else int(TokenType.NORMAL) for id in range(size)]
    return GGUFVocabulary(
        "gpt2",
        pre,
        [names.get(id, f"[PAD{id}]") for id in range(size)],
        types,
        _adds_bos(tokenizer),
        tokenizer.named_templates.get("chat_template"),
        merges=merges,
    )


def _type_of(token: AddedToken | None) -> int:
    if token is None:
        return int(TokenType.UNUSED)
    return int(TokenType.CONTROL if token.special else TokenType.USER_DEFINED)


def _adds_bos(tokenizer: Tokenizer) -> bool:
    if isinstance(tokenizer, ChatGLM2Tokenizer):  # a warning reports the tokens that it adds
        return False
    begin = tokenizer.encode("", add_special_tokens=True)
    if begin not in ([], [tokenizer.bos_token_id]):
        raise UserError(
            f"the tokenizer in {tokenizer.source} puts the tokens {begin} around a text: GGUF supports only BOS, or no tokens"
        )
    return bool(begin)


def _pre_tokenizer_name(tokenizer: HuggingFaceTokenizer, backend: dict[str, Any]) -> str:
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
    for name, pre in PRE_TOKENIZERS.items():
        if (tuple(cuts), is_nfc, whole_words_first) == (pre.patterns, pre.is_nfc, pre.whole_words_first):
            return name
    raise UserError(
        f"the tokenizer in {tokenizer.source} splits texts by a pattern without a name in GGUF: only {', '.join(PRE_TOKENIZERS)}"
    )
