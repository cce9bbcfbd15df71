"""Text to token ids and back, chat templates: the tokenizer files of a checkpoint, read by transformers without remote code."""

from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from conf.errors import UserError

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer:
    """The three things that the pipelines need of a tokenizer, with the same rules for every family."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        self._tokenizer = tokenizer
        self.folder = folder

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """The folder's tokenizer, or None where the folder holds no tokenizer files. Raises UserError if they cannot be read."""
        if not any((folder / name).is_file() for name in FILES):
            return None
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a damaged file makes the library raise
            raise UserError(
                f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error
        return cls(tokenizer, folder)

    @property
    def bos_token_id(self) -> int | None:
        return cast(int | None, self._tokenizer.bos_token_id)

    @property
    def eos_token_id(self) -> int | None:
        return cast(int | None, self._tokenizer.eos_token_id)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return cast(list[int], self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Exactly the tokens' text: no clean-up of spaces, whatever the tokenizer's settings say."""
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def apply_chat_template(self, messages: list[dict[str, Any]], template: str | None) -> str:
        """The conversation as text, ready for the assistant's turn. `template` is Jinja source; None: the tokenizer's own.

        Raises UserError where there is no template and where the template refuses the messages.
        """
        if template is None and not self._tokenizer.chat_template:
            raise UserError(
                f"the tokenizer in {self.folder} has no chat template: give predict.chat_template=PATH, or prompts instead of messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # the template's own raise_exception, or any fault of its Jinja
            raise UserError(f"the chat template does not take these messages: {error}") from error
        return cast(str, text)
