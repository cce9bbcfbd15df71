"""Lark grammars over bytes and special tokens: whether a text matches, and random texts that match."""

import json
import random
import re
from collections.abc import Sequence
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from conf.guides import check_guide
from models.chat.description import ChatFormat
from pipelines.engine.guide import OPTIONS, _limits

EOS, FIRST = 256, 257
NUM_TOKENS = 320
SPECIAL = re.compile(r"<\|[^|]*\|>|<｜[^｜]*｜>|｜DSML｜|\[/?[A-Z_]+\]|<\|[a-z_]+>|<[a-z_]+\|>")
"""The parts of formats that are special tokens in the families' vocabularies."""
DIGITS, EXPONENT = frozenset(b"0123456789"), frozenset(b"eE")
ORDINARY = frozenset(b"abcdefghijklmnopqrstuvwxyz 0123456789")


class Vocabulary:
    """Bytes, and special tokens with these texts. It has what `Literals` and llguidance read of a tokenizer."""

    eos_token_id, bos_token_id = EOS, None
    special_token_ids = list(range(EOS, NUM_TOKENS))

    def __init__(self, special_texts: Sequence[str], control_texts: Sequence[str] = ()) -> None:
        self.special_texts, self.control_texts = list(special_texts), [*special_texts, *control_texts]
        self.tokens = [bytes([i]) for i in range(EOS)] + [f"<{i}>".encode() for i in self.special_token_ids]

    @classmethod
    def of_format(cls, form: ChatFormat, has_special: bool = True) -> "Vocabulary":
        """Return a vocabulary for a format, with or without special tokens."""
        special = sorted({text for literal in form.literals for text in SPECIAL.findall(literal)})
        return cls(special if has_special else [], [form.reasoning.open.strip()] if form.reasoning else [])

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError

    def special_token_id(self, text: str) -> int | None:
        return FIRST + self.special_texts.index(text) if text in self.special_texts else None

    def encode(self, text: str) -> list[int]:
        longest_first = sorted(self.special_texts, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text) if longest_first else [text]
        return [id for piece in pieces for id in self._ids(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(bytes([id]) if id < EOS else self.special_texts[id - FIRST].encode() for id in ids).decode()

    @cached_property
    def trie(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self))

    def _ids(self, piece: str) -> list[int]:
        id = self.special_token_id(piece)
        return list(piece.encode()) if id is None else [id]


class Grammar:
    """A compiled guide, under the limits of the engine."""

    def __init__(self, guide: dict[str, str], vocabulary: Vocabulary) -> None:
        check_guide(guide)
        self._vocabulary = vocabulary
        grammar = {"grammars": [{"lark_grammar": f"{guide['lark']}\n{OPTIONS}"}]}
        self._matcher = LLMatcher(vocabulary.trie, json.dumps(grammar), log_level=0, limits=_limits())
        assert not self._matcher.is_error(), self._matcher.get_error() + guide["lark"]

    def matches(self, text: str) -> bool:
        matcher, ids = self._matcher.deep_copy(), self._vocabulary.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def random_text(self, draw: random.Random, closers: Sequence[str], limit: int = 600) -> str | None:
        """Return a text of random allowed tokens; None if it has no end after `limit` tokens.

        Free text ends soon by one of `closers`, and JSON strings by a quotation mark.
        """
        matcher, ids = self._matcher.deep_copy(), list[int]()
        while len(ids) < limit:
            mask = matcher.compute_bitmask()
            allowed = [id for id in range(NUM_TOKENS) if mask[id >> 3] >> (id & 7) & 1]
            assert allowed, f"nothing may follow {self._vocabulary.decode(ids)}"
            if EOS in allowed and (len(allowed) == 1 or draw.random() < 0.5):
                return self._vocabulary.decode(ids)
            ids += (step := self._step(matcher, [id for id in allowed if id != EOS], ids, draw, closers))
            assert matcher.consume_tokens(step), matcher.get_error()
        return None

    def _step(
        self, matcher: LLMatcher, allowed: list[int], ids: list[int], draw: random.Random, closers: Sequence[str]
    ) -> list[int]:
        if len(allowed) > 60 and draw.random() < 0.4:
            is_free = 1 in allowed  # a control character, which JSON strings cannot hold
            for text in draw.sample(closers, len(closers)) if is_free else ['"']:
                if (step := self._vocabulary.encode(text)) and matcher.validate_tokens(step) == len(step):
                    return step
        # Numbers that no float holds are not drawn: an exponent follows a digit.
        pool = [id for id in allowed if id not in EXPONENT or not ids or ids[-1] not in DIGITS] or allowed
        pool = [id for id in pool if id < 128 or id >= FIRST] or pool
        rare = [id for id in pool if id not in ORDINARY]
        return [draw.choice(rare if rare and draw.random() < 0.35 else pool)]
