"""Encode rows to token ids, by the settings of `predict` or of another task."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from conf.errors import UserError
from conf.tasks import Truncation
from models.tokenizers import Tokenizer
from models.tokenizers.template_files import read_template
from models.tokenizers.truncation import truncated
from pipelines.jobs.data_files import expanded
from pipelines.jobs.prompts import PromptRow, check_unicode


@dataclass(frozen=True)
class EncodedPrompt:
    text: str | None
    """The model's input as text; None if only its token ids are known."""
    token_ids: list[int]
    prediction_token_ids: list[int] = field(default_factory=list)
    num_truncated: int = 0
    """Number of the prompt's tokens that were cut off."""


class PromptEncoder:
    """Encodes rows to token ids, by predict.add_special_tokens and predict.chat_template."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        add_special_tokens: bool,
        chat_template: str,
        add_generation_prompt: bool = True,
        truncate: Truncation = Truncation.none,
        max_tokens: int | None = None,
    ) -> None:
        """`add_generation_prompt`: whether a conversation ends with the start of an answer.

        `truncate`, `max_tokens`: as `predict.truncate` and `predict.max_prompt_tokens`.
        """
        self._add_generation_prompt = add_generation_prompt
        self._from_left = truncate is Truncation.left
        self._max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._use_templates = chat_template != "none"
        self._template = None if chat_template in ("auto", "none") else _read_template(expanded(chat_template))

    def encode(self, row: PromptRow) -> EncodedPrompt:
        """Encode a row.

        Raises UserError for a row with an error, and for a row that needs a missing tokenizer or template.
        """
        if row.error is not None:
            raise UserError(row.error)
        if row.pair is not None:
            raise UserError("query and document are scored by task=score: give a prompt")
        prompt = self._truncated(row, self._input(row))
        if row.prediction is None:
            return prompt
        if self._tokenizer is None:
            raise UserError("there is no tokenizer for the prediction: leave it out, or give model.tokenizer=PATH")
        return replace(prompt, prediction_token_ids=self._tokenizer.encode(row.prediction, add_special_tokens=False))

    def _truncated(self, row: PromptRow, prompt: EncodedPrompt) -> EncodedPrompt:
        """Return the prompt with at most max_tokens. Special tokens around a text are kept."""
        if self._max_tokens is None or len(prompt.token_ids) <= self._max_tokens:
            return prompt
        text = None if row.prompt is None or self._template is not None else row.prompt
        if text is not None and self._tokenizer is not None:
            token_ids, num_cut = truncated(self._tokenizer, text, prompt.token_ids, self._max_tokens, self._from_left)
            return replace(prompt, token_ids=token_ids, num_truncated=num_cut)
        num_cut = len(prompt.token_ids) - self._max_tokens
        token_ids = prompt.token_ids[num_cut:] if self._from_left else prompt.token_ids[: self._max_tokens]
        return replace(prompt, token_ids=token_ids, num_truncated=num_cut)

    def _input(self, row: PromptRow) -> EncodedPrompt:
        tokenizer = self._tokenizer
        if row.prompt_token_ids is not None:
            text = None if tokenizer is None else tokenizer.decode(row.prompt_token_ids, skip_special_tokens=True)
            return EncodedPrompt(text, row.prompt_token_ids)
        if tokenizer is None:
            raise UserError("there is no tokenizer for this text: give prompt_token_ids, or model.tokenizer=PATH")
        messages = row.messages
        if messages is None and self._template is not None:
            messages = [{"role": "user", "content": row.prompt}]
        if messages is not None:
            if not self._use_templates:
                raise UserError("messages need a chat template, but predict.chat_template=none: give auto or a path")
            for message in messages:
                check_unicode("the text", message["role"])
                check_unicode("the text", message.get("content") or "")
            return EncodedPrompt(*tokenizer.encode_messages(messages, self._template, self._add_generation_prompt))
        assert row.prompt is not None
        check_unicode("the text", row.prompt)
        token_ids = tokenizer.encode(row.prompt, self._add_special_tokens)
        if not token_ids and self._add_special_tokens and tokenizer.bos_token_id is not None:
            token_ids = [tokenizer.bos_token_id]  # an empty prompt needs one token
        return EncodedPrompt(row.prompt, token_ids)


def _read_template(path: Path) -> str:
    try:
        return read_template(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"predict.chat_template={path} cannot be read ({error}): give auto, none or the path of a Jinja file"
        ) from error
