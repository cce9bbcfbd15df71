"""The written chat formats, and which of them a template and a vocabulary have."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from conf.errors import UserError
from models.chat.description import ChatFormat, read_description

FORMATS_FILE = Path(__file__).with_name("formats.yaml")


@dataclass(frozen=True)
class Signs:
    """Texts and tokens that identify a format."""

    template: tuple[str, ...] = ()
    """Texts that the template has."""
    lacks: tuple[str, ...] = ()
    """Texts that the template has not."""
    vocabulary: tuple[str, ...] = ()
    """Control tokens of a model whose template shows no format."""

    def match_template(self, template: str) -> bool:
        has_texts = bool(self.template) and all(text in template for text in self.template)
        return has_texts and not any(text in template for text in self.lacks)

    def match_vocabulary(self, tokens: Collection[str]) -> bool:
        return bool(self.vocabulary) and all(token in tokens for token in self.vocabulary)


@dataclass(frozen=True)
class Entry:
    """A written format."""

    signs: Signs
    form: ChatFormat


@cache
def entries() -> dict[str, Entry]:
    """Return the written formats by name, in the order in which they are tried."""
    return {name: _entry(name, value) for name, value in yaml.safe_load(FORMATS_FILE.read_text("utf-8")).items()}


def matching_entries(template: str, tokens: Collection[str]) -> list[str]:
    """Return the names of the formats that a template has, or else a vocabulary, likeliest first."""
    by_template = [name for name, entry in entries().items() if entry.signs.match_template(template)]
    return by_template or [name for name, entry in entries().items() if entry.signs.match_vocabulary(tokens)]


def read_format_file(path: Path) -> ChatFormat:
    """Return the format that a YAML file describes. Raises UserError for a file that cannot be read."""
    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read as a chat format: {reason}: give a YAML file") from error
    return read_description(value, str(path))


def _entry(name: str, value: dict[str, Any]) -> Entry:
    signs = value.pop("signs", {})
    return Entry(Signs(**{key: tuple(texts) for key, texts in signs.items()}), read_description(value, name))
