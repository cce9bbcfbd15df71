"""Conversations with words that no template writes by itself, and their renderings."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from conf.errors import UserError
from models.chat.history import HistoryForm, Message, for_template

MAX_RENDERINGS = 48
MAX_CHARACTERS = 1 << 16
"""Most characters of a rendering that the probe looks at."""
MAX_S = 8.0
"""Seconds after which no rendering starts. A template that is stopped takes two."""

USER, SECOND_USER, CONTENT, REASONING, RESULT = "Uzq1", "Uzq2", "Szq3", "Rzq4", "Tzq5"
FIRST, SECOND = "fzq", "gzq"
TEXT_KEY, NUMBER_KEY = "kzqa", "kzqb"
TEXT, NUMBER = "vzqc", 7301


class Render(Protocol):
    """Renders a conversation with a chat template. Raises UserError if the template refuses it."""

    def __call__(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any],
    ) -> str: ...


def tool(name: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": dict(properties), "required": []}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


SCHEMA = {
    TEXT_KEY: {"type": "string", "description": "d"},
    NUMBER_KEY: {"type": "integer", "description": "d"},
}
TOOLS = [tool(name, SCHEMA) for name in (FIRST, SECOND)]
ARGUMENTS = {TEXT_KEY: TEXT, NUMBER_KEY: NUMBER}


def call(name: str, arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "id": call_id(index), "function": {"name": name, "arguments": text}}


def call_id(index: int) -> str:
    """Return an id that every family takes."""
    return f"izq{index:06}"


def user(text: str = USER) -> Message:
    return {"role": "user", "content": text}


def answer(content: str | None = None, calls: Sequence[dict[str, Any]] = (), reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


class Renderings:
    """Renderings of a template, bounded in number and length."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._texts: dict[str, str | UserError] = {}
        self._end = time.monotonic() + MAX_S
        self.first_error = ""
        """The message of the first refusal."""

    @property
    def count(self) -> int:
        return len(self._texts)

    def text(
        self,
        messages: Sequence[Message],
        history: HistoryForm | None = None,
        prompts: bool = False,
        arguments: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = TOOLS,
    ) -> str | None:
        """Return a conversation as text, in a form of the history; None if the template refuses it.

        `prompts`: whether the text ends where the next answer begins. Raises UserError beyond MAX_RENDERINGS.
        """
        messages = for_template(messages, history or HistoryForm())
        key = json.dumps([messages, prompts, arguments, tools])
        if key not in self._texts:
            if len(self._texts) >= MAX_RENDERINGS:
                raise UserError(f"the probe of the chat template needs more than {MAX_RENDERINGS} renderings")
            if time.monotonic() > self._end:
                raise UserError(f"the probe of the chat template takes more than {MAX_S:g} s")
            self._texts[key] = self._rendered(messages, prompts, arguments or {}, tools)
        text = self._texts[key]
        return text if isinstance(text, str) else None

    def behind(self, needle: str, *arguments: Any, **named: Any) -> str | None:
        """Return `text` behind the last place of a needle; None if there is none."""
        text = self.text(*arguments, **named)
        return None if text is None or needle not in text else text[text.rindex(needle) + len(needle) :]

    def _rendered(
        self, messages: list[Message], prompts: bool, arguments: Mapping[str, Any], tools: Any
    ) -> str | UserError:
        try:
            text = self._render(messages, tools, prompts, arguments)
            if len(text) <= MAX_CHARACTERS:
                return text
            raise UserError(f"the chat template writes {len(text)} characters, more than {MAX_CHARACTERS}")
        except UserError as error:
            self.first_error = self.first_error or str(error)
            return error
