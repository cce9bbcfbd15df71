"""The interface of every tokenizer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conf.errors import UserError
from models.tokenizers.template_process import TemplateProcess

Message = dict[str, Any]
"""A turn of a conversation, with a text "role" and a text "content"."""


class Tokenizer(ABC):
    source: Path
    """Folder or file that it was read from."""
    size: int
    """The highest token id plus 1."""
    bos_token_id: int | None
    eos_token_id: int | None
    turn_end_ids: tuple[int, ...] = ()
    """Tokens besides eos that end an answer in this family's conversations."""
    chat_template: str | None = None
    """Jinja source of the chat template; None where code writes conversations, or where there is no template."""
    special_tokens: Mapping[str, str] = MappingProxyType({})
    """Texts of bos_token, eos_token and so on, for templates that name them."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Return exactly the tokens' text, without the clean-up of spaces that a tokenizer's settings may ask for."""

    @abstractmethod
    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes that a token adds to a text behind other tokens, which may be a part of a character.

        None for a special token, for one that stands for what is unknown, and for an id that is no token. At the very beginning of a text
        `decode` may leave a space out. Raises UserError for a kind of tokenizer whose tokens have no bytes of their own.
        """

    def save(self, folder: Path) -> None:
        """Write files that `load_tokenizer` and transformers read. Raises UserError for a tokenizer that was read from such files."""
        raise UserError(f"the tokenizer in {self.source} cannot be written in another form: copy its files")

    def encode_messages(
        self, messages: list[Message], template: str | None, add_generation_prompt: bool = True
    ) -> tuple[str, list[int]]:
        """Return a conversation as text and as token ids, ready for the assistant's turn, or as it ends without `add_generation_prompt`.

        template: Jinja source, or None for the own one.

        Raises UserError where there is no template, and where the template refuses the messages.
        """
        template = template or self.chat_template
        if template is None:
            if not add_generation_prompt:
                whole = "always begins an answer, but a whole conversation is wanted"
                raise UserError(
                    f"the own format of the tokenizer in {self.source} {whole}: give prompts instead of messages"
                )
            token_ids = self._own_format(messages)
            return self.decode(token_ids, skip_special_tokens=False), token_ids
        text = self._templates.render(template, messages, self.special_tokens, add_generation_prompt)
        return text, self.encode(text, add_special_tokens=False)  # the template wrote any BOS

    @cached_property
    def _templates(self) -> TemplateProcess:
        return TemplateProcess()

    def _own_format(self, messages: list[Message]) -> list[int]:
        """Return a conversation as token ids, as the family's own code writes it. Raises UserError for an unknown role."""
        raise UserError(
            f"the tokenizer in {self.source} has no chat template: give predict.chat_template=PATH, or prompts instead of messages"
        )


def refuse_role(message: Message, known: str) -> UserError:
    return UserError(f"the chat template does not take these messages: role {message['role']!r} is none of {known}")
