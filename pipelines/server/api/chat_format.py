"""The chat format of the served model."""

from dataclasses import dataclass
from pathlib import Path

from conf.errors import UserError
from models.chat.description import ChatFormat
from models.chat.entries import entries, matching_entries, read_format_file
from models.tokenizers.base import Tokenizer

WITHOUT_CALLS = "text"
"""The format of models that show no other: reasoning between <think> and </think>."""


@dataclass(frozen=True)
class ServedFormat:
    """A chat format, and how it was chosen."""

    name: str
    form: ChatFormat
    origin: str
    """config, entry, probe or refused."""
    reason: str = ""
    """Why calls cannot be read."""


def served_format(tokenizer: Tokenizer | None, template: str | None, setting: str) -> ServedFormat:
    """Return the format of a model. `template`: as in Tokenizer.encode_messages. `setting`: serve.response_template.

    Raises UserError for an unknown name, and for a file that is no description.
    """
    if setting != "auto":
        return _configured(setting)
    if tokenizer is None:
        return ServedFormat("none", ChatFormat(), "refused", "there is no tokenizer")
    if tokenizer.coded_chat_format and template is None:
        return _entry(tokenizer.coded_chat_format)
    templates = template or f"{tokenizer.chat_template or ''}{tokenizer.tool_template or ''}"
    names = matching_entries(templates, tokenizer.control_texts)
    if names:
        return _entry(names[0])
    return ServedFormat(WITHOUT_CALLS, entries()[WITHOUT_CALLS].form, "refused", "its template shows no known format")


def _entry(name: str) -> ServedFormat:
    return ServedFormat(name, entries()[name].form, "entry")


def _configured(setting: str) -> ServedFormat:
    if setting in entries():
        form = entries()[setting].form
    elif Path(setting).expanduser().is_file():
        form = read_format_file(Path(setting).expanduser())
    else:
        names = ", ".join(entries())
        raise UserError(
            f"serve.response_template={setting!r} is not allowed: give auto, a YAML file, or one of {names}"
        )
    return ServedFormat(setting, form, "config", f"serve.response_template={setting} has none")
