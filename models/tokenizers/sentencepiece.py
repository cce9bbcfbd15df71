"""Read SentencePiece vocabularies: Llama, Baichuan, ChatGLM.

The library splits texts; each family adds its special tokens.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from conf.errors import UserError
from models.tokenizers.added_tokens import AddedTokens
from models.tokenizers.base import Message, Tokenizer, Tool, refuse_role
from models.tokenizers.chat import LLAMA2, chatglm3_messages
from models.tokenizers.control_tokens import joined_runs
from models.tokenizers.runner_form import form_of_pieces
from models.tokenizers.tokenizer_json import Settings, named_tokens, special_tokens

SPACE = "▁"  # the space in pieces


class SentencePieceTokenizer(Tokenizer):
    """Llama's tokenizer: adds BOS before a text, and recognises added tokens in a text.

    Added tokens are the control pieces, and the tokens that the files next to tokenizer.model add.
    """

    chat_template: str | None = LLAMA2
    _adds_bos, _adds_eos = True, False
    _reads_added = True
    """Whether `encode` recognises added tokens in a text."""
    _is_legacy = True
    """Whether text after an added token gets a space prefix, as the beginning of a text does."""

    def __init__(self, file: Path, model: bytes | None = None) -> None:
        """`model`: the serialised ModelProto, if `file` is not one itself. Raises UserError if it cannot be read."""
        from sentencepiece import SentencePieceProcessor  # imported here: other tokenizers do not need it

        self.source = file.parent
        try:
            self._pieces = SentencePieceProcessor(
                **({"model_file": str(file)} if model is None else {"model_proto": model})
            )
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"the tokenizer in {file.parent} cannot be read: {file.name}: {reason}") from error
        pieces = range(self._pieces.get_piece_size())
        self.add_tokens({id: _special(self._pieces.id_to_piece(id)) for id in pieces if self._pieces.is_control(id)})
        self.bos_token_id = self._pieces.bos_id() if self._pieces.bos_id() >= 0 else None
        self.eos_token_id = self._pieces.eos_id() if self._pieces.eos_id() >= 0 else None

    def add_tokens(self, tokens: Mapping[int, AddedToken]) -> None:
        """Set the added tokens. They follow the pieces or, as in InternLM2, replace pieces."""
        self._added = AddedTokens(tokens)
        self.size = max(self._pieces.get_piece_size(), *(id + 1 for id in tokens))

    @property
    def added_tokens(self) -> Mapping[int, AddedToken]:
        return self._added.by_id

    def read_settings(self, settings: Settings, added: Mapping[str, int], is_llama: bool) -> None:
        """Apply the settings of the files next to tokenizer.model, which `tokenizer_json.read_settings` returns.

        `is_llama`: whether it is transformers' LlamaTokenizer, which adds no space after an added token. Meta's code
        does add one; its vocabulary has only the pieces.
        """
        self._adds_bos, self._adds_eos = (
            settings.get("add_bos_token") is not False,
            settings.get("add_eos_token") is True,
        )
        if settings.get("add_prefix_space") is False:
            self._pieces = self._continued
        specials = special_tokens(settings)
        unknown = self._pieces.unk_id()
        tokens = {unknown: _special(self._pieces.id_to_piece(unknown)), **self.added_tokens}
        tokens |= {int(id): AddedToken(**token) for id, token in settings.get("added_tokens_decoder", {}).items()}
        tokens |= {id: specials.get(text, AddedToken(text)) for text, id in added.items() if id not in tokens}
        ids = {token.content: id for id, token in tokens.items()}
        for text, token in specials.items():
            if text not in ids:
                piece, next_id = self._pieces.piece_to_id(text), max(self.size, *(id + 1 for id in tokens))
                ids[text] = piece if self._pieces.id_to_piece(piece) == text else next_id
            tokens[ids[text]] = token
        self.add_tokens(tokens)
        is_extended = any(self._pieces.piece_to_id(token.content) != id for id, token in tokens.items())
        self._is_legacy = bool(settings.get("legacy", not is_extended)) if is_llama else True
        self.special_tokens = {name: token.content for name, token in named_tokens(settings)}
        self.bos_token_id, self.eos_token_id = (
            ids.get(self.special_tokens.get(name, ""), id)
            for name, id in (("bos_token", self.bos_token_id), ("eos_token", self.eos_token_id))
        )

    def _runner_form(self) -> dict[str, Any]:
        return form_of_pieces(self._model, self.added_tokens, self._reads_added, self._is_legacy)

    @property
    def model_proto(self) -> bytes:
        model: bytes = self._pieces.serialized_model_proto()
        return model

    @cached_property
    def max_token_bytes(self) -> int | None:
        ids, rules = range(self._pieces.get_piece_size()), self._model.normalizer_spec
        keeps_text = not rules.precompiled_charsmap and not rules.remove_extra_whitespaces
        is_whole = sum(map(self._pieces.is_byte, ids)) == 256  # else unknown text becomes one token
        if not keeps_text or not is_whole or self._added.strips:
            return None
        added = (token.content for token in self.added_tokens.values())
        return max(len(name.encode()) for name in [*map(self._pieces.id_to_piece, ids), *added])

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        begin = [self.bos_token_id] if add_special_tokens and self._adds_bos else []
        end = [self.eos_token_id] if add_special_tokens and self._adds_eos else []
        return [id for id in [*begin, *self._encode_runs(self._cut(text)), *end] if id is not None]

    def _encode_runs(self, runs: Iterable[str | int], is_first: bool = True) -> list[int]:
        """Return the ids of a text that is split at its added tokens.

        `is_first`: whether it is the beginning of a text.
        """
        ids: list[int] = []
        for run in runs:
            if isinstance(run, int):
                ids.append(run)
            elif is_first:
                ids += self._encode_pieces(run)
            else:
                ids += self._continued.encode(run)
            is_first = self._is_legacy
        return ids

    @cached_property
    def _control_names(self) -> Mapping[str, bool]:
        return dict.fromkeys(self._user_defined, False) | {
            token.content: token.special for token in self.added_tokens.values()
        }

    def _cut(self, text: str) -> Iterator[str | int]:
        return self._added.cut(text) if self._reads_added else iter([text])

    def _encode_parts(self, parts: list[str]) -> list[int]:
        ids: list[int] = []
        begin = 0
        for cut in [*(i for i in range(1, len(parts), 2) if parts[i] in self._user_defined), len(parts)]:
            ids += self._encode_runs(joined_runs(parts[begin:cut], self._cut), is_first=not begin)
            if cut < len(parts):
                ids += self._spelled.encode(parts[cut])
            begin = cut + 1
        return ids

    @cached_property
    def _user_defined(self) -> dict[str, int]:
        """Pieces that the library recognises anywhere in a text."""
        pieces = self._model.pieces
        return {piece.piece: id for id, piece in enumerate(pieces) if piece.type == piece.USER_DEFINED}

    @property
    def _model(self) -> Any:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        return ModelProto.FromString(self.model_proto)

    @cached_property
    def _continued(self) -> Any:
        """The vocabulary for text inside another text, which gets no space prefix."""
        from sentencepiece import SentencePieceProcessor

        model = self._model
        model.normalizer_spec.add_dummy_prefix = False
        return SentencePieceProcessor(model_proto=model.SerializeToString())

    @cached_property
    def _spelled(self) -> Any:
        """The vocabulary for text inside another text, without user-defined pieces."""
        from sentencepiece import SentencePieceProcessor

        model = self._model
        model.normalizer_spec.add_dummy_prefix = False
        for id in self._user_defined.values():
            model.pieces[id].type = model.pieces[id].UNUSED
        return SentencePieceProcessor(model_proto=model.SerializeToString())

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text, added = "", self.added_tokens
        for is_added, run in itertools.groupby(token_ids, self._is_added):
            ids = list(run)
            if is_added:
                tokens = [added[id] for id in ids if id in added]
                text += "".join(token.content for token in tokens if not (token.special and skip_special_tokens))
            else:
                text += self._decode_pieces(ids) if self._is_legacy or not text else self._continued.decode(ids)
        return text

    def token_bytes(self, id: int) -> bytes | None:
        if id in self.added_tokens:
            return None if self.added_tokens[id].special else self.added_tokens[id].content.encode()
        if id < 0 or self._is_added(id) or self._pieces.is_unknown(id):
            return None
        piece: str = self._pieces.id_to_piece(id)
        return bytes([int(piece[3:5], 16)]) if self._pieces.is_byte(id) else self._text_of(piece).encode()

    def _text_of(self, piece: str) -> str:
        return piece.replace(SPACE, " ")

    def _is_added(self, id: int) -> bool:
        return id in self.added_tokens or id >= self._pieces.get_piece_size()

    def _encode_pieces(self, text: str) -> list[int]:
        ids: list[int] = self._pieces.encode(text)
        return ids

    def _decode_pieces(self, ids: list[int]) -> str:
        text: str = self._pieces.decode(ids)
        return text


class BaichuanTokenizer(SentencePieceTokenizer):
    """Baichuan's tokenizer. Ids in generation_config.json mark the turns (Baichuan-13B-Chat, Baichuan2-Chat)."""

    chat_template = None
    _reads_added = False

    def __init__(self, file: Path, turns: Mapping[str, object], eos_after_answers: bool) -> None:
        """`turns`: ids that open the turns of user and assistant; not integers in a base model."""
        super().__init__(file)
        self._turns = {role: id for role, id in turns.items() if isinstance(id, int)}
        self._eos_after_answers = eos_after_answers

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encode_pieces(text)  # adds no tokens and recognises no special tokens

    @cached_property
    def _control_names(self) -> Mapping[str, bool]:
        return dict.fromkeys(self._user_defined, False)

    def _encode_content(self, text: str) -> list[int]:
        """Return the token ids of a message. Text must not become the user-defined pieces that open turns."""
        names = "|".join(re.escape(self._pieces.id_to_piece(id)) for id in self._turns.values())
        return self._encode_parts(re.split(f"({names})", text))

    def _own_format(self, messages: list[Message]) -> list[int]:
        if len(self._turns) < 2:
            return Tokenizer._own_format(self, messages)  # raises: there is no format
        ids: list[int] = []
        for i, message in enumerate(messages):
            if message["role"] == "system" and i == 0 and not self._eos_after_answers:
                ids += self._encode_content(message["content"])
            elif message["role"] not in self._turns:
                raise refuse_role(
                    message, "user, assistant" if self._eos_after_answers else "system (first), user, assistant"
                )
            else:
                ids += [self._turns[message["role"]], *self._encode_content(message["content"])]
                if message["role"] == "assistant" and self._eos_after_answers and self.eos_token_id is not None:
                    ids.append(self.eos_token_id)
        return [*ids, self._turns["assistant"]]


class ChatGLM2Tokenizer(SentencePieceTokenizer):
    """ChatGLM2 and ChatGLM3: [gMASK] sop before a text.

    Special tokens follow the pieces and are not recognised in a text.
    """

    chat_template = None
    _reads_added = False

    NAMES = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
    ROLES = ("system", "user", "assistant", "observation")  # of ChatGLM3

    def __init__(self, file: Path, has_roles: bool) -> None:
        super().__init__(file)
        names = self.NAMES + (tuple(f"<|{role}|>" for role in self.ROLES) if has_roles else ())
        self._ids = {name: self._pieces.get_piece_size() + i for i, name in enumerate(names)}
        self.add_tokens({**self.added_tokens, **{id: _special(name) for name, id in self._ids.items()}})
        self._prefix = [self._ids["[gMASK]"], self._ids["sop"]]
        self._has_roles = has_roles
        self.coded_chat_format = "chatglm3" if has_roles else None
        if has_roles:
            self.turn_end_ids = (self._ids["<|user|>"], self._ids["<|observation|>"])

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return (self._prefix if add_special_tokens else []) + self._encode_pieces(text)

    @cached_property
    def _control_names(self) -> Mapping[str, bool]:
        return dict.fromkeys(self._user_defined, False)

    def _own_format(self, messages: list[Message]) -> list[int]:
        if not self._has_roles:
            return self.encode(rounds(messages, first=1, gap="\n\n"), add_special_tokens=True)
        ids = list(self._prefix)
        for message in messages:
            if message["role"] not in self.ROLES:
                raise refuse_role(message, ", ".join(self.ROLES))
            ids.append(self._ids[f"<|{message['role']}|>"])
            ids += self._encode_pieces(f"{message.get('metadata', '')}\n") + self._encode_pieces(message["content"])
        return [*ids, self._ids["<|assistant|>"]]

    def _with_tools(self, messages: list[Message], tools: list[Tool]) -> list[Message]:
        return chatglm3_messages(messages, tools) if self._has_roles else super()._with_tools(messages, tools)


class ChatGLMTokenizer(SentencePieceTokenizer):
    """ChatGLM-6B: [gMASK] <sop> after a text. Line breaks, tabs and runs of spaces are separate pieces."""

    chat_template = None
    _reads_added = False
    MOST_BLANKS = 80

    @cached_property
    def max_token_bytes(self) -> int | None:
        most = super().max_token_bytes
        return most and max(most, self.MOST_BLANKS)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        suffix = [self._pieces.piece_to_id(name) for name in ("[gMASK]", "<sop>")] if add_special_tokens else []
        return self._encode_pieces(text) + suffix

    @cached_property
    def _control_names(self) -> Mapping[str, bool]:
        return dict.fromkeys(self._user_defined, False)

    def _encode_pieces(self, text: str) -> list[int]:
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        return super()._encode_pieces(
            re.sub(f" {{2,{self.MOST_BLANKS}}}", lambda run: f"<|blank_{len(run[0])}|>", text)
        )

    def _decode_pieces(self, ids: list[int]) -> str:
        return self._with_blanks(super()._decode_pieces(ids))

    def _text_of(self, piece: str) -> str:
        return self._with_blanks(super()._text_of(piece))

    def _with_blanks(self, text: str) -> str:
        text = text.replace("<n>", "\n").replace("<|tab|>", "\t")
        return re.sub(r"<\|blank_(\d\d?)\|>", lambda run: " " * int(run[1]), text)

    def _own_format(self, messages: list[Message]) -> list[int]:
        asked_once = len(messages) == 1 and messages[0]["role"] == "user"
        text = messages[0]["content"] if asked_once else rounds(messages, first=0, gap="\n")
        return self.encode(text, add_special_tokens=True)


def _special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def rounds(messages: list[Message], first: int, gap: str) -> str:
    """Return ChatGLM's conversation as text.

    It has rounds of question and answer, numbered from `first`; the last round has no answer.
    """
    roles = [message["role"] for message in messages]
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise UserError(
            f"the chat template does not take these messages: the roles must be user and assistant in turn, not {roles}"
        )
    text = ""
    for i in range(0, len(messages), 2):
        answer = messages[i + 1]["content"] + gap if i + 1 < len(messages) else ""
        text += f"[Round {first + i // 2}]{gap}问：{messages[i]['content']}{gap}答：{answer}"
    return text
