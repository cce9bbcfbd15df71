"""Find the chat templates of a folder, and read a template file.

Source: transformers' `PreTrainedTokenizerBase.from_pretrained`.
"""

import json
from pathlib import Path
from typing import Any

from conf.errors import UserError
from models.config import read_json

NAMED_TEMPLATES = "additional_chat_templates"  # folder with one template per file, named as the file
PROCESSOR_FILE = "chat_template.json"  # of older multimodal checkpoints


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the folder's chat templates by name.

    Template files have precedence over the tokenizer's settings, which have precedence over the processor's file.
    """
    default_file = folder / "chat_template.jinja"
    files = {"default": default_file} if default_file.is_file() else {}
    files |= {file.stem: file for file in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    templates = {name: file.read_text(encoding="utf-8-sig") for name, file in files.items()}
    if default_file.is_file():
        return templates
    settings = read_json(folder / "tokenizer_config.json").get("chat_template")
    return _by_name(settings or read_json(folder / PROCESSOR_FILE).get("chat_template")) | templates


def read_template(file: Path) -> str:
    """Return the Jinja source in a file, which may be a processor's chat_template.json.

    Raises OSError, UnicodeDecodeError, UserError.
    """
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix != ".json":
        return text
    try:
        value = json.loads(text)["chat_template"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} has no key chat_template: give a Jinja file") from error
    templates = _by_name(value)
    if "default" not in templates:
        raise UserError(
            f"{file} has no template named default, but {', '.join(templates) or 'none'}: give a Jinja file"
        )
    return templates["default"]


def _by_name(value: Any) -> dict[str, str]:
    templates = {item["name"]: item["template"] for item in value} if isinstance(value, list) else {"default": value}
    for template in templates.values():
        if not isinstance(template, str | None):
            raise UserError(f"chat_template={template!r} is not a text")
    return {name: template for name, template in templates.items() if template}
