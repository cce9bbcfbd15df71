"""Kimi's tokenizer (K2, K2-Thinking, Moonlight), after tokenization_kimi.py of moonshotai/Kimi-K2-Instruct."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from conf.errors import UserError
from models.config import read_json
from models.tokenizers.base import Tokenizer
from models.tokenizers.huggingface import damage_refused
from models.tokenizers.template_files import chat_templates
from models.tokenizers.tiktoken import TiktokenTokenizer, read_ranks
from models.tokenizers.tokenizer_json import named_tokens

KIMI_RANKS = "tiktoken.model"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for word in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*")
        ),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Pattern that splits a text before merges."""
NUM_SPECIALS = 256  # ids after the ranks, named in tokenizer_config.json or not
LONGEST_TEXT, LONGEST_RUN = 400_000, 25_000  # characters per encoding call; of a run with or without spaces


class KimiTokenizer(TiktokenTokenizer):
    _runner_form = Tokenizer._runner_form  # long texts are split before the pattern splits them

    def __init__(self, folder: Path) -> None:
        settings, ranks = read_json(folder / "tokenizer_config.json"), read_ranks(folder / KIMI_RANKS)
        added = {int(id): entry for id, entry in settings.get("added_tokens_decoder", {}).items()}
        ids = range(len(ranks), len(ranks) + NUM_SPECIALS)
        names = tuple(added[id]["content"] if id in added else f"<|reserved_token_{id}|>" for id in ids)
        if wrong := sorted(added.keys() - {*ids}):
            raise UserError(f"added_tokens_decoder has the id {wrong[0]}, which is not from {ids[0]} to {ids[-1]}")
        if len({*names}) < len(names):
            raise UserError("added_tokens_decoder has a text twice")
        texts = frozenset(entry["content"] for entry in added.values() if not entry.get("special", False))
        super().__init__(folder / KIMI_RANKS, ranks, KIMI_PATTERN, names, texts)
        self.special_tokens = {name: token.content for name, token in named_tokens(settings)}
        self.bos_token_id, self.eos_token_id = (
            self._id_of(self.special_tokens.get(name)) for name in ("bos_token", "eos_token")
        )
        self.turn_end_ids = tuple(self._specials[name] for name in ("<|im_end|>",) if name in self._specials)
        self.take_templates(chat_templates(folder))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Recognises special tokens in the text, and adds none."""
        return super().encode(text, add_special_tokens=False)

    def _ids(self, text: str, **options: Any) -> list[int]:
        return list(chain.from_iterable(self._encoding.encode(piece, **options) for piece in pieces(text)))

    def _id_of(self, name: str | None) -> int | None:
        if name is not None and name not in self._specials:
            raise UserError(f"tokenizer_config.json names the special token {name!r}, which does not exist")
        return None if name is None else self._specials[name]


def load_kimi(folder: Path) -> Tokenizer:
    """Return the tokenizer in a folder. Raises UserError if it cannot be read."""
    with damage_refused(folder):
        return KimiTokenizer(folder)


def pieces(text: str) -> Iterator[str]:
    """Yield pieces of a text that is too long for one encoding call.

    As in the original code, tokens do not cross pieces.
    """
    for start in range(0, len(text), LONGEST_TEXT):
        part, end = text[start : start + LONGEST_TEXT], 0
        for run in re.finditer(r"\s+|\S+", part):
            for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
                yield part[end:cut]
                end = cut
        yield part[end:]
