"""Find the special tokens of a GGUF file by llama.cpp's rules. A file may list only some of them, or mark them as normal.

Source: `llama_vocab::impl::load` in llama.cpp's src/llama-vocab.cpp.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken

from conf.errors import UserError
from models.formats.gguf.header import GGUFHeader

LIST = "tokenizer.ggml.tokens"
SPACE = "▁"  # the space in sentencepiece tokens
SPACES_BEHIND_SPECIAL = "quintet.tokenizer.spaces_behind_special"  # our own key; true if missing
NONE = 2**32 - 1  # id of an absent token in a file
PIECES = "llama"  # the sentencepiece kind of vocabulary
DEFAULT_IDS = {PIECES: {"bos": 1, "eos": 2}}
ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "[e~[",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
)
FIM_TOKENS = {  # parts of a fill-in-the-middle prompt; the last three also end a text
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>")
    + ("<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>")
    + ("<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>")
    + ("<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss; visible in texts
# If the vocabulary has all tokens of one of these sets, <|end|> only ends a part of an answer. If it has one of
# PLAIN_EOS_MARKERS, </s> is plain text.
HARMONY_CALLS = ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"})
PLAIN_EOS_MARKERS = ("<|tool_response>", "<|plamo:eos|>")
PHI3, PHI3_KEEPS_SPACE = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class SpecialTokens:
    """The vocabulary's tokens with the types that llama.cpp gives them."""

    header: GGUFHeader

    @cached_property
    def texts(self) -> list[str]:
        return self.header.texts(LIST)

    @cached_property
    def bos(self) -> int | None:
        return self.id("bos")

    @cached_property
    def eos(self) -> int | None:
        return self.id("eos")

    def id(self, name: str) -> int | None:
        """Return a token's id from the file, or the default of the vocabulary kind.

        Raises UserError if the id is out of range.
        """
        read, size = self.header.section("tokenizer.ggml"), len(self.texts)
        default = DEFAULT_IDS.get(self._kind, {}).get(name, NONE)
        id = read.get(f"{name}_token_id", int, default if default < size else NONE)
        if id in (-1, NONE):
            return None
        if not 0 <= id < size:
            raise UserError(
                f"{self.header.path}: tokenizer.ggml.{name}_token_id={id} is not the id of one of the {size} tokens"
            )
        return id

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Return the ids that end a text: ids that the file names (EOS first), and tokens with a known end text."""
        named = [self.id(name) for name in ("eos", "eot", "eom", *FIM_ENDS)]
        spelled = [self._ids[text] for text in self._end_texts if text in self._ids]
        code = [self._ids[text] for name in FIM_ENDS for text in self._fim_texts(name)]
        return tuple(
            dict.fromkeys(id for id in (*named, *spelled, *code) if id is not None and id not in self._not_ends)
        )

    @cached_property
    def types(self) -> list[int]:
        types = list(map(int, self.header.numbers("tokenizer.ggml.token_type", "i", len(self.texts))))
        if wrong := set(types) - set(TokenType):
            raise UserError(
                f"{self.header.path}: tokenizer.ggml.token_type holds {min(wrong)}, expected 1 to {max(TokenType)}"
            )
        code = (text for name in FIM_TOKENS for text in self._fim_texts(name))
        for text in (*self._end_texts, *code):
            if text in self._ids and types[self._ids[text]] != TokenType.UNKNOWN:
                types[self._ids[text]] = TokenType.CONTROL
        for id, kind in self._not_ends.items():
            types[id] = kind
        for text in HARMONY:
            if text in self._ids:
                types[self._ids[text]] = TokenType.USER_DEFINED
        return types

    def added(self) -> dict[int, AddedToken]:
        """Return the added tokens by id. User-defined pieces have spaces instead of ▁."""
        name = str(self.header.scalars.get("general.name", "")).lower()
        is_phi3 = any(part in name for part in PHI3)
        special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
        added: dict[int, AddedToken] = {}
        for id, (text, kind) in enumerate(zip(self.texts, self.types, strict=True)):
            if text and kind in special:
                is_piece = self._kind == PIECES and kind == TokenType.USER_DEFINED
                content = text.replace(SPACE, " ") if is_piece else text
                strips = is_phi3 and text not in PHI3_KEEPS_SPACE
                added[id] = AddedToken(content, special=special[TokenType(kind)], normalized=False, rstrip=strips)
        return added

    def by_name(self) -> dict[str, str]:
        ids = {"bos_token": self.bos, "eos_token": self.eos}
        return {name: self.texts[id] for name, id in ids.items() if id is not None}

    @property
    def _kind(self) -> Any:
        return self.header.section("tokenizer.ggml").raw("model")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {text: id for id, text in enumerate(self.texts)}

    def _fim_texts(self, name: str) -> list[str]:
        """Return the vocabulary's token for a key of FIM_TOKENS, unless the file gives its id."""
        file_id = self.header.section("tokenizer.ggml").raw(f"{name}_token_id")
        return [text for text in FIM_TOKENS[name] if text in self._ids][:1] if file_id is None else []

    @property
    def _end_texts(self) -> tuple[str, ...]:
        return tuple(text for text in ENDS if self._ids.get(text) not in self._not_ends)

    @cached_property
    def _not_ends(self) -> dict[int, int]:
        """Return the types of tokens in ENDS that do not end a text in this vocabulary, by id."""
        types: dict[int, int] = {}
        if "<|end|>" in self._ids and any(calls <= self._ids.keys() for calls in HARMONY_CALLS):
            types[self._ids["<|end|>"]] = TokenType.USER_DEFINED
        if "</s>" in self._ids and any(text in self._ids for text in PLAIN_EOS_MARKERS):
            types[self._ids["</s>"]] = TokenType.NORMAL
        return types
