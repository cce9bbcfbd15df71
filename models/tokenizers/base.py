"""What the pipelines need of any tokenizer, with the same rules for every family."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conf.errors import UserError
from models.tokenizers.template_process import TemplateProcess

Message = dict[str, Any]
"""A text "role" and a text "content"."""


class Tokenizer(ABC):
    source: Path
    """Where its files are."""
    size: int
    """One more than the highest id."""
    bos_token_id: int | None
    eos_token_id: int | None
    turn_end_ids: tuple[int, ...] = ()
    """Tokens besides eos that end an answer in this family's conversations."""
    chat_template: str | None = None
    """Jinja source of its conversations; None where code writes them, or where it has none."""
    special_tokens: Mapping[str, str] = MappingProxyType({})
    """bos_token, eos_token and so on, for templates that name them."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Exactly the tokens' text: no clean-up of spaces, whatever the tokenizer's settings say."""

    def save(self, folder: Path) -> None:
        """Write it as files that `load_tokenizer` and transformers read. Raises UserError for kinds that only come in such files."""
        raise UserError(f"the tokenizer in {self.source} cannot be written in another form: copy its files")

    def encode_messages(self, messages: list[Message], template: str | None) -> tuple[str, list[int]]:
        """The conversation as text and as token ids, ready for the assistant's turn. `template` is Jinja source; None: the family's own.

        Raises UserError where there is no template and where the template refuses the messages.
        """
        template = template or self.chat_template
        if template is None:
            token_ids = self._own_format(messages)
            return self.decode(token_ids, skip_special_tokens=False), token_ids
        text = self._templates.render(template, messages, self.special_tokens)
        return text, self.encode(text, add_special_tokens=False)  # the template wrote any BOS

    @cached_property
    def _templates(self) -> TemplateProcess:
        return TemplateProcess()

    def _own_format(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation as the family's own code writes them. Raises UserError for a role that it does not know."""
        raise UserError(
            f"the tokenizer in {self.source} has no chat template: give predict.chat_template=PATH, or prompts instead of messages"
        )


def refuse_role(message: Message, known: str) -> UserError:
    return UserError(f"the chat template does not take these messages: role {message['role']!r} is none of {known}")
