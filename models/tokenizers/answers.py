"""Parse a model's answer incrementally: content, reasoning and tool calls, in the formats of the families.

A format is a table of literals. Nothing from a checkpoint is executed, and none of its regular expressions is used. The
result does not depend on how the text is split into pieces.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from models.tokenizers.tool_calls import (
    ToolCall,
    read_deepseek_calls,
    read_json_call,
    read_json_calls,
    read_kimi_calls,
    read_mistral_calls,
    read_named_json_call,
    read_named_python_call,
)

SPACE = " \t\r\n"


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning text before the answer."""

    text: str


Part = Content | Reasoning | ToolCall


@dataclass(frozen=True)
class Region:
    """A part of an answer that is not content."""

    opening: str
    """Text at which it begins; empty for a region that is the whole answer."""
    closing: str | None
    """None: the region extends to the end of the answer."""
    read_calls: Callable[[str], list[ToolCall] | None] | None = None
    """Returns the calls in the region, or None if it is not a call. The field is None for reasoning."""


@dataclass(frozen=True)
class AnswerFormat:
    """How a family writes reasoning and tool calls."""

    regions: tuple[Region, ...] = ()
    answer_region: Region | None = None
    """The region that is the whole answer, if `begins` returns True."""
    begins: Callable[[str, frozenset[str]], bool | None] = lambda text, names: False
    """Whether an answer with this beginning calls one of the named tools; None if undecided."""
    is_trimmed: bool = False
    """Whether every answer begins with white space that is not part of it."""

    @property
    def literals(self) -> list[str]:
        """Texts that must not be removed from the answer's text."""
        return [text for region in self.regions for text in (region.opening, region.closing) if text]

    @property
    def calls(self) -> bool:
        """Whether the format has tool calls."""
        return self.answer_region is not None or any(region.read_calls for region in self.regions)

    def without_calls(self) -> "AnswerFormat":
        """Return the format for requests without tools, in which calls are content."""
        return AnswerFormat(
            tuple(region for region in self.regions if not region.read_calls), is_trimmed=self.is_trimmed
        )


def _begins_with_json(text: str, names: frozenset[str]) -> bool | None:
    return text[0] == "{" if text else None


def _begins_with_name(text: str, names: frozenset[str]) -> bool | None:
    line, end, _ = text.partition("\n")
    if end:
        return line.rstrip(SPACE) in names
    return None if not line or any(name.startswith(line.rstrip(SPACE)) for name in names) else False


THINKING = Region("<think>", "</think>")
FORMATS = {
    "none": AnswerFormat(),
    "text": AnswerFormat((THINKING,)),
    "hermes": AnswerFormat((THINKING, Region("<tool_call>", "</tool_call>", read_json_call))),
    "llama3": AnswerFormat(
        (Region("<|python_tag|>", None, read_json_calls),), Region("", None, read_json_calls), _begins_with_json
    ),
    "mistral": AnswerFormat((Region("[THINK]", "[/THINK]"), Region("[TOOL_CALLS]", None, read_mistral_calls))),
    "deepseek": AnswerFormat((THINKING, Region("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", read_deepseek_calls))),
    "kimi": AnswerFormat(
        (THINKING, Region("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", read_kimi_calls))
    ),
    "chatglm3": AnswerFormat((), Region("", None, read_named_python_call), _begins_with_name, is_trimmed=True),
    "glm4": AnswerFormat((), Region("", None, read_named_json_call), _begins_with_name, is_trimmed=True),
}
"""Formats by name: of Qwen and Hermes, Llama 3, Mistral, DeepSeek, Kimi, ChatGLM3, GLM-4. `text` has only reasoning,
`none` has nothing.
"""
SIGNS = {
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "kimi": "<|tool_calls_section_begin|>",
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "glm4": "<|observation|>",
}
"""Texts that identify a format, in a template or among the control tokens."""
UNSUPPORTED_SIGNS = ("<function=", "<arg_key>")  # XML calls of Qwen3-Coder, of GLM-4.5


def find_format(template: str | None, names: Iterable[str]) -> str:
    """Return the name of a family's format, by its chat template and the texts of its control tokens.

    Returns "text" if nothing identifies the format.
    """
    names = set(names)
    if any(sign in (template or "") for sign in UNSUPPORTED_SIGNS):
        return "text"
    for text in (template or "", names):  # the template is stronger evidence than the vocabulary
        for name, sign in SIGNS.items():
            if sign in text:
                return name
    return "text"


class AnswerReader:
    """Parses one answer."""

    def __init__(
        self, form: AnswerFormat, tool_names: Iterable[str] = (), reasons: bool = False, dropped: Iterable[str] = ()
    ) -> None:
        """`tool_names`: the offered tools. `reasons`: whether the prompt ends inside the reasoning.

        `dropped`: special tokens to remove from the text, if the tokenizer has not removed them.
        """
        self._dropped = tuple(dropped)
        self._any_dropped = re.compile("|".join(map(re.escape, self._dropped)) or "(?!)")
        self._held = ""  # may be the start of a dropped text
        self._names = frozenset(tool_names)
        self._form = form if self._names else form.without_calls()
        self._rest = ""
        self._region = next((region for region in form.regions if not region.read_calls), None) if reasons else None
        self._is_beginning = self._region is None
        self._space = ""  # dropped if a region follows
        self._is_behind_region = reasons or form.is_trimmed
        self._parts: list[Part] = []
        self.has_broken_call = False
        """Whether an apparent call was invalid. Its text is content."""

    def read(self, text: str) -> list[Part]:
        """Return the parts that are certain after the next piece of text."""
        *complete, last = self._any_dropped.split(self._held + text)
        keep = _partial_literal_length(last, self._dropped)
        self._held = last[len(last) - keep :]
        self._rest += "".join(complete) + last[: len(last) - keep]
        return self._read(is_end=False)

    def end(self) -> list[Part]:
        """Return the remaining parts at the end of the answer."""
        self._rest += self._held
        return self._read(is_end=True)

    def _read(self, is_end: bool) -> list[Part]:
        if self._is_beginning and not self._begin(is_end):
            return []
        while self._read_region(is_end) if self._region else self._read_content(is_end):
            pass
        if is_end and not self._is_behind_region:
            self._add(Content(self._space))
        parts, self._parts = self._parts, []
        return parts

    def _begin(self, is_end: bool) -> bool:
        """Decide whether the whole answer is a call. Return False if undecided."""
        is_call = self._form.begins(self._rest.lstrip(SPACE), self._names) if self._form.answer_region else False
        if is_call is None and not is_end:
            return False
        self._is_beginning = False
        self._region = self._form.answer_region if is_call else None
        return True

    def _read_content(self, is_end: bool) -> bool:
        """Consume text up to the next region. Return whether a region follows."""
        openings = [(self._rest.find(region.opening), region) for region in self._form.regions]
        start, region = min((item for item in openings if item[0] >= 0), key=lambda item: item[0], default=(-1, None))
        if region is None:
            keep = (
                0 if is_end else _partial_literal_length(self._rest, [region.opening for region in self._form.regions])
            )
            start = len(self._rest) - keep
        self._add_text(Content, self._rest[:start])
        self._rest = self._rest[start + len(region.opening) :] if region else self._rest[start:]
        self._region = region
        if region and not region.read_calls:
            self._space, self._is_behind_region = "", True
        return region is not None

    def _read_region(self, is_end: bool) -> bool:
        """Consume text up to the end of the region. Return whether content follows."""
        region = self._region
        assert region
        stop = self._rest.find(region.closing) if region.closing else -1
        if not region.read_calls:
            keep = 0 if is_end or stop >= 0 else _partial_literal_length(self._rest, [region.closing or ""])
            cut = stop if stop >= 0 else len(self._rest) - keep
            self._add_text(Reasoning, self._rest[:cut])
            self._rest = self._rest[cut:]
            self._space = "" if is_end else self._space
            stop = min(stop, 0)
        elif stop >= 0 or is_end:
            self._call(region, self._rest[:stop] if stop >= 0 else self._rest, stop >= 0)
        if stop < 0:
            if is_end:
                self._rest, self._region = "", None
            return False
        self._rest = self._rest[stop + len(region.closing or "") :]
        self._region = None
        if not region.read_calls:
            self._space, self._is_behind_region = "", True
        return True

    def _call(self, region: Region, body: str, is_closed: bool) -> None:
        assert region.read_calls
        calls = region.read_calls(body)
        if calls and (region.opening or all(call.name in self._names for call in calls)):
            self._parts += calls
            self._space, self._is_behind_region = "", True
        else:
            # Text without an opening only might be a call, such as an answer in JSON. It is not a broken call.
            self.has_broken_call |= bool(region.opening)
            self._add_text(Content, region.opening + body + (region.closing or "") * is_closed)

    def _add_text(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Add text. White space at its end waits for the next text."""
        text = self._space + text
        if self._is_behind_region:
            text = text.lstrip(SPACE)
        stripped = text.rstrip(SPACE)
        self._space = text[len(stripped) :]
        if stripped:
            self._is_behind_region = False
            self._add(kind(stripped))

    def _add(self, part: Content | Reasoning) -> None:
        last = self._parts[-1] if self._parts else None
        if not part.text:
            return
        if isinstance(last, Content | Reasoning) and type(last) is type(part):
            self._parts[-1] = replace(last, text=last.text + part.text)
        else:
            self._parts.append(part)


def _partial_literal_length(text: str, literals: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a literal."""
    longest = max(map(len, literals), default=1) - 1
    ends = range(min(longest, len(text)), 0, -1)
    return next(
        (size for size in ends if any(literal.startswith(text[-size:]) for literal in literals if len(literal) > size)),
        0,
    )
