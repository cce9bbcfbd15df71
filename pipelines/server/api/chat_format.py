"""The chat format of the served model."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.errors import UserError, shortened
from models.chat.choice import Choice, choose, history_of
from models.chat.description import ChatFormat
from models.chat.entries import entries, matching_entries, read_format_file
from models.chat.history import for_template
from models.chat.needles import Render, Renderings
from models.chat.special_tokens import Vocabulary
from models.chat.switch import OFF, arguments_of_effort, find_switches
from models.config import read_json
from models.tokenizers.base import Message, Tokenizer
from pipelines.server.api.chat_prompt import vocabulary_of

log = logging.getLogger(__name__)

WITHOUT_CALLS = "text"
"""The format of models that show no other: reasoning between <think> and </think>."""


@dataclass(frozen=True)
class ServedFormat(Choice):
    """The chat format in use, and the special tokens in its literals."""

    vocabulary: Vocabulary | None = None

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages for the template. Role developer becomes system."""
        renamed = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
        return for_template(renamed, self.history)

    def effort_arguments(self, effort: str) -> tuple[dict[str, Any], list[str]]:
        """Return the template arguments that express a reasoning effort, and warnings about it.

        A template with levels gets the nearest one.
        """
        arguments, expressed = arguments_of_effort(self.switches, effort)
        field = f"reasoning_effort={effort}"
        if expressed is None:
            return arguments, [f"{field} is not used: the chat template has no argument for it"]
        if expressed == "" and effort != OFF:
            return arguments, [f"{field} only turns reasoning on: the chat template has no levels"]
        return arguments, [] if expressed in (effort, "") else [f"{field} becomes {expressed} for the chat template"]


def served_format(tokenizer: Tokenizer | None, template: str | None, setting: str) -> ServedFormat:
    """Return the format of a model. `template`: as in Tokenizer.encode_messages. `setting`: serve.response_template.

    Raises UserError for an unknown name, and for a file without a valid description.
    """
    served = _served_format(tokenizer, template, setting)
    if tokenizer is None:
        return served
    settings = read_json(tokenizer.source / "tokenizer_config.json") if tokenizer.source.is_dir() else {}
    if others := unnamed_literals(settings, served.form):
        what = f"the tokenizer's response_template does not name {others[0]}"
        log.warning("%s, a marker of the chat format %s: see serve.response_template", what, served.name)
    return replace(served, vocabulary=vocabulary_of(tokenizer, served.form))


def unnamed_literals(settings: Mapping[str, Any], form: ChatFormat) -> list[str]:
    """Return the opening literals of a format that transformers' response_template does not have.

    `settings`: tokenizer_config.json. The regular expressions of a response_template are compared as texts, and not run.
    """
    hint = settings.get("response_template") or settings.get("response_schema")
    if not isinstance(hint, Mapping):
        return []
    text = json.dumps(hint, ensure_ascii=False).replace("\\", "")
    spans = [form.reasoning.open if form.reasoning else "", form.calls.opening if form.calls else ""]
    return [line for span in spans for line in span.split("\n")[:1] if line.strip() and line.strip() not in text]


def _served_format(tokenizer: Tokenizer | None, template: str | None, setting: str) -> ServedFormat:
    source = (template or tokenizer.tool_template or tokenizer.chat_template or "") if tokenizer else ""
    if setting != "auto":
        return (
            _fitted(configured_format(setting), tokenizer, source)
            if tokenizer and source
            else configured_format(setting)
        )
    if tokenizer is None:
        return ServedFormat("none", ChatFormat(), "refused", "the model has no tokenizer")
    if tokenizer.coded_chat_format and template is None:
        return _entry(tokenizer.coded_chat_format)
    if not source:
        names = matching_entries("", tokenizer.control_texts)
        return _entry(names[0]) if names else _without_calls("its template shows no known format")
    texts = template or f"{tokenizer.chat_template or ''}{tokenizer.tool_template or ''}"
    choice = choose(_renderer(tokenizer, source), texts, tokenizer.control_texts, _variables(tokenizer, source))
    if choice.form == ChatFormat():
        return _without_calls(choice.reason)
    return ServedFormat(**vars(choice))


def _fitted(served: ServedFormat, tokenizer: Tokenizer, template: str) -> ServedFormat:
    """Return a configured format with the history's form and the switches of a template."""
    render = _renderer(tokenizer, template)
    history, warning = history_of(render, served.form)
    if warning:
        log.warning("serve.response_template=%s: %s", served.name, warning)
    try:
        switches = find_switches(Renderings(render), _variables(tokenizer, template))
    except UserError as error:
        log.warning("the chat template's arguments for reasoning are not found: %s", shortened(str(error)))
        switches = ()
    return replace(served, history=history, switches=switches)


def _without_calls(reason: str) -> ServedFormat:
    return ServedFormat(WITHOUT_CALLS, entries()[WITHOUT_CALLS].form, "refused", reason)


def _renderer(tokenizer: Tokenizer, template: str) -> Render:
    def render(messages: Any, tools: Any, add_generation_prompt: bool, arguments: Mapping[str, Any]) -> str:
        return tokenizer.rendered(template, messages, tools, add_generation_prompt, arguments)

    return render


def _variables(tokenizer: Tokenizer, template: str) -> Collection[str]:
    try:
        return tokenizer.template_variables(template)
    except UserError:  # no Jinja: a request with messages gets this error
        return ()


def _entry(name: str) -> ServedFormat:
    return ServedFormat(name, entries()[name].form, "entry")


def configured_format(setting: str) -> ServedFormat:
    """Return the format that serve.response_template names. Raises UserError as `served_format` does."""
    if setting in entries():
        form = entries()[setting].form
    elif Path(setting).expanduser().is_file():
        form = read_format_file(Path(setting).expanduser())
    else:
        names = ", ".join(entries())
        raise UserError(
            f"serve.response_template={setting!r} is not allowed: give auto, a YAML file, or one of {names}"
        )
    reason = "" if form.calls else f"serve.response_template={setting} has none"
    return ServedFormat(setting, form, "config", reason)
