"""Read BPE ranks in tiktoken's format, one line of base64 and rank per token: Qwen v1, Llama 3, Kimi (`kimi.py`)."""

import base64
import unicodedata
from collections.abc import Mapping
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from conf.errors import UserError
from models.tokenizers.added_tokens import AddedTokens
from models.tokenizers.base import Message, Tokenizer, refuse_role
from models.tokenizers.control_tokens import joined_runs
from models.tokenizers.runner_form import form_of_ranks
from models.tokenizers.split_program import Ranges, Sets, all_tested, ranges_of

# Split patterns from the families' own tokenizers. Qwen splits off each digit, Llama 3 groups of up to three.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35_PATTERN = QWEN_PATTERN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
"""Qwen 2's, with combining marks as parts of words."""
LLAMA3_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
LLAMA3_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 247)),
)


class TiktokenTokenizer(Tokenizer):
    """A vocabulary of ranks, with special tokens after or before them."""

    def __init__(
        self,
        file: Path,
        ranks: dict[bytes, int],
        pattern: str,
        specials: tuple[str, ...],
        texts: frozenset[str] = frozenset(),
        first_special: int | None = None,
    ) -> None:
        """`ranks`: ids of the tokens in `file`. `texts`: names in `specials` that are part of an answer's text, such as
        <think>.

        `first_special`: id of the first name in `specials`; None: they follow the ranks.
        """
        import tiktoken  # imported here: other tokenizers do not need it

        self.source = file.parent
        self.ranks = ranks
        first = len(ranks) if first_special is None else first_special
        self._specials = {name: first + i for i, name in enumerate(specials)}
        self._skipped = frozenset(id for name, id in self._specials.items() if name not in texts)
        self.size = len(ranks) + len(specials)
        self._ranks, self._pattern = ranks, pattern
        self._encoding = tiktoken.Encoding(
            file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self._specials
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Recognises special tokens in the text."""
        begin = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return begin + self._ids(text, allowed_special="all")

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        skipped = self._skipped if skip_special_tokens else frozenset()
        text: str = self._encoding.decode([id for id in token_ids if id < self.size and id not in skipped])
        return text

    def token_bytes(self, id: int) -> bytes | None:
        if not 0 <= id < self.size or id in self._skipped:
            return None
        token: bytes = self._encoding.decode_single_token_bytes(id)
        return token

    @cached_property
    def max_token_bytes(self) -> int | None:
        return max(map(len, [*self._encoding.token_byte_values(), *map(str.encode, self._specials)]))

    @property
    def _control_names(self) -> Mapping[str, bool]:
        return {name: id in self._skipped for name, id in self._specials.items()}

    def _encode_parts(self, parts: list[str]) -> list[int]:
        return list(chain.from_iterable(map(self._plain_or_special, joined_runs(parts, self._added.cut))))

    @cached_property
    def _added(self) -> AddedTokens:
        return AddedTokens({id: special_token(name, id in self._skipped) for name, id in self._specials.items()})

    @property
    def added_tokens(self) -> Mapping[int, AddedToken]:
        return self._added.by_id

    def _runner_form(self) -> dict[str, Any]:
        return form_of_ranks(self._ranks, self._pattern, Sets(members), self._added.by_id)

    def _plain_or_special(self, run: str | int) -> list[int]:
        return [run] if isinstance(run, int) else self._plain(run)

    def _plain(self, text: str) -> list[int]:
        """Return the token ids of a user's text. Special tokens in it stay text."""
        return self._ids(text, disallowed_special=())

    def _ids(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self._encoding.encode(text, **options)
        return ids


class QwenTokenizer(TiktokenTokenizer):
    """Qwen v1's tokenizer: texts in NFC, conversations in ChatML."""

    is_nfc = True
    _runner_form = Tokenizer._runner_form  # NFC applies before special tokens are found
    SYSTEM = "You are a helpful assistant."  # for conversations without a system message

    def __init__(self, file: Path) -> None:
        super().__init__(file, read_ranks(file), QWEN_PATTERN, QWEN_SPECIALS)
        self.bos_token_id = None
        self.eos_token_id = self._specials["<|endoftext|>"]
        self.turn_end_ids = (self._specials["<|im_start|>"], self._specials["<|im_end|>"])

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return super().encode(unicodedata.normalize("NFC", text), add_special_tokens)

    def _own_format(self, messages: list[Message]) -> list[int]:
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.SYSTEM}, *messages]
        ids: list[int] = []
        for i, message in enumerate(messages):
            if message["role"] not in ("user", "assistant") and not (i == 0 and message["role"] == "system"):
                raise refuse_role(message, "system (first), user, assistant")
            ids += [*self._opened(message["role"]), *self._plain(message["content"]), self._specials["<|im_end|>"]]
            ids += self._plain("\n")
        return ids + self._opened("assistant")

    def _plain(self, text: str) -> list[int]:
        return super()._plain(unicodedata.normalize("NFC", text))

    def _opened(self, role: str) -> list[int]:
        return [self._specials["<|im_start|>"], *self._plain(f"{role}\n")]


class Llama3Tokenizer(TiktokenTokenizer):
    """Llama 3's tokenizer in Meta's form: `tokenizer.model` holds ranks."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, read_ranks(file), LLAMA3_PATTERN, LLAMA3_SPECIALS)
        self.bos_token_id = self._specials["<|begin_of_text|>"]
        self.eos_token_id = self._specials["<|end_of_text|>"]
        self.turn_end_ids = (self._specials["<|eot_id|>"], self._specials["<|eom_id|>"])

    def _own_format(self, messages: list[Message]) -> list[int]:
        ids = [self._specials["<|begin_of_text|>"]]
        for message in messages:
            ids += [*self._opened(message["role"]), *self._plain(f"\n\n{message['content'].strip()}")]
            ids.append(self._specials["<|eot_id|>"])
        return [*ids, *self._opened("assistant"), *self._plain("\n\n")]

    def _opened(self, role: str) -> list[int]:
        return [self._specials["<|start_header_id|>"], *self._plain(role), self._specials["<|end_header_id|>"]]


def special_token(name: str, is_special: bool = True) -> AddedToken:
    return AddedToken(name, special=is_special, normalized=False)


@lru_cache(maxsize=64)
def members(pattern: str, tested: str | None = None) -> Ranges:
    """Return the code points that tiktoken matches with a pattern of one character (see `split_program.members`)."""
    import tiktoken

    encoding = tiktoken.Encoding(
        "one character",
        pat_str=pattern,
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={},
    )
    return ranges_of(encoding.decode(encoding.encode_ordinary(all_tested() if tested is None else tested)))


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the ranks of all tokens by their bytes.

    Raises UserError if the file cannot be read, if its ranks are not 0, 1, 2 ..., or if a byte has no token.
    """
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != list(range(len(lines))):
            raise ValueError(f"{len(lines)} tokens do not have the ranks 0 to {len(lines) - 1}, each once")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise ValueError(f"no token is the byte {missing[0]}")
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer in {file.parent} cannot be read: {file.name}: {error}") from error
    return ranks
