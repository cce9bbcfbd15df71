"""Tokenizer files that transformers reads: tokenizer.json, or vocab.json with merges.txt. No remote code."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from conf.errors import UserError
from models.tokenizers.base import Message, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTINGS = ("tokenizer_config.json", "config.json", "tokenizer.json")  # without one of them it can only be GPT-2's


class HuggingFaceTokenizer(Tokenizer):
    def __init__(
        self, source: Path, read: "Callable[[], PreTrainedTokenizerBase]", template: str | None = None
    ) -> None:
        """`template`: the family's, where what is read holds none. Raises UserError if it cannot be read."""
        self.source = source
        try:
            self._tokenizer = read()
        except Exception as error:  # whatever a damaged file makes the library raise
            raise UserError(
                f"the tokenizer in {source} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error
        # Each new token is decoded twice, and the library's own checks take six times as long as that.
        self._decode: Callable[..., str] = (
            self.backend.decode
            if self._tokenizer.is_fast
            else partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)  # type: ignore[arg-type]
        )
        self.chat_template = self._tokenizer.chat_template or template
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.bos_token_id = cast(int | None, self._tokenizer.bos_token_id)
        self.eos_token_id = cast(int | None, self._tokenizer.eos_token_id)

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` that does the work."""
        return self._tokenizer.backend_tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Not verbose: it would warn of texts beyond the model's context, which are the engine's to refuse or to cut into windows.
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return cast(list[int], encoded["input_ids"])

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self._decode(token_ids, skip_special_tokens=skip_special_tokens)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def encode_messages(self, messages: list[Message], template: str | None) -> tuple[str, list[int]]:
        template = template or self.chat_template
        if template is None:
            self._own_format(messages)  # raises: there is none
        try:
            text: Any = self._tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # the template's own raise_exception, or any fault of its Jinja
            raise UserError(f"the chat template does not take these messages: {error}") from error
        return text, self.encode(text, add_special_tokens=False)


def load_huggingface(folder: Path, template: str | None = None) -> HuggingFaceTokenizer:
    """Raises UserError if the folder's files cannot be read."""
    return HuggingFaceTokenizer(folder, partial(_read, folder), template)


def _read(folder: Path) -> "PreTrainedTokenizerBase":
    # Here, because it takes a second that other tokenizers need not wait for.
    from transformers import AutoTokenizer, GPT2Tokenizer

    if not any((folder / name).is_file() for name in SETTINGS):
        return GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
