"""The description of a chat format: how a model marks its reasoning, its answer and its tool calls.

The reader of answers, the grammar of forced calls and the probe of templates work from this description. Nothing from a
checkpoint is executed, and none of its regular expressions is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import zip_longest
from types import NoneType
from typing import Any, NamedTuple, get_type_hints

from conf.errors import UserError, shortened

MAX_LITERAL = 200
"""Most characters of a literal."""


class Span(NamedTuple):
    """The literals around a part of an answer. White space at their ends is optional when an answer is read."""

    open: str = ""
    close: str = ""


class Body(StrEnum):
    """How a call writes its arguments."""

    object = "object"
    """A JSON object that holds the name and the arguments, or a list of such objects."""
    json = "json"
    """A name, and the arguments as a JSON object."""
    tagged = "tagged"
    """A name, and each argument between tags."""
    gemma = "gemma"
    """A name, and an object with bare keys and strings between `quote` marks."""
    python = "python"
    """Python calls with keyword arguments, separately or in a list. Objects as in `object` are read, too."""
    harmony = "harmony"
    """Messages with a header that names the channel and the recipient, as gpt-oss writes them. The arguments are a JSON
    object, or tagged if the format has a `tag`.
    """
    elements = "elements"
    """A name, and arguments as nested elements that are named by their keys. `tag.key_open` is the marker before each
    tag.
    """
    chatglm3 = "chatglm3"
    """A name, and below it a fenced Python call `tool_call(...)`."""


class Keys(NamedTuple):
    """The keys of a call's JSON object."""

    name: str | None = "name"
    """None: the only key is the name, and its value the arguments."""
    arguments: str = "arguments"
    id: str | None = None


class Tag(NamedTuple):
    """The literals of an argument: key_open KEY key_close VALUE value_close.

    A line break at the end of `key_close` and at the beginning of `value_close` is removed from the value once.
    """

    key_open: str = ""
    key_close: str = ""
    value_close: str = ""
    is_string: str | None = None
    """The end of the key's tag for a value that is a string. Such formats state it, for example ` string="true">`, and
    `key_close` is the end for other values. None: the tool's schema says whether a value is a string.
    """


@dataclass(frozen=True)
class CallFormat:
    """How a family writes tool calls: section.open call (separator call)* section.close."""

    body: Body
    section: Span = Span()
    """Around all calls of an answer. If both openings are empty, calls begin the answer, or a line of it."""
    call: Span = Span()
    """Around a call: before the name or the object, and after the arguments."""
    separator: str = ""
    name_close: str = ""
    """Between the name and the arguments, for bodies with the name before the arguments."""
    keys: Keys = Keys()
    tag: Tag = Tag()
    quote: str = ""
    """The mark around strings of body gemma."""
    id_open: str = ""
    """Between the name and the id, if the call has one there."""
    id_form: str = ""
    """The id that replaces the name, with {name} and {index}, such as `functions.{name}:{index}`."""
    max_calls: int | None = None
    """1 if an answer has at most one call."""
    is_bare: bool = False
    """Whether models also begin calls without the literal `section.open`."""
    aliases: tuple[Span, ...] = ()
    """Other literals that models write instead of `section`. They are read, and never written."""

    @property
    def opening(self) -> str:
        """The literal at which calls begin; empty if they have none."""
        return self.section.open or self.call.open


@dataclass(frozen=True)
class ChatFormat:
    """How a family writes answers."""

    reasoning: Span | None = None
    limit_text: str = ""
    """Written where the reasoning reaches its limit of tokens, with `reasoning.close` in it; empty: a line break and
    `reasoning.close`.
    """
    answer: Span | None = None
    """Around the text of an answer. These literals are dropped."""
    calls: CallFormat | None = None
    stops: tuple[str, ...] = ()
    """Texts of tokens that end an answer, besides EOS."""

    @property
    def has_messages(self) -> bool:
        """Whether every answer consists of messages with headers."""
        return self.calls is not None and self.calls.body is Body.harmony

    def without_calls(self) -> "ChatFormat":
        """Return the format for requests without tools, in which calls are content."""
        return self if self.has_messages else replace(self, calls=None)

    def begun(self, prompt: str) -> str:
        """Return the literal with which a prompt begins the answer, for example the opening of the reasoning."""
        texts = [self.reasoning.open if self.reasoning else "", self.calls.call.open if self.calls else ""]
        return next((text for text in texts if text.strip() and prompt.rstrip().endswith(text.strip())), "")

    @property
    def literals(self) -> list[str]:
        """The literals that must stay in the text of an answer, without outer white space."""
        spans = [span for span in (self.reasoning, self.answer) if span]
        texts = [text for span in spans for text in span]
        if calls := self.calls:
            tag = calls.tag
            texts += [*calls.section, *calls.call, calls.separator, calls.name_close, calls.id_open, calls.quote]
            texts += [text for span in calls.aliases for text in span]
            texts += [tag.key_open, tag.key_close, tag.value_close, tag.is_string or ""]
            texts += HARMONY if calls.body is Body.harmony else ()
        return sorted({text.strip() for text in texts if text.strip()})


HARMONY = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|eom|>",
    "<|eot|>",
)


def read_description(value: Any, where: str) -> ChatFormat:
    """Return the format that a mapping of a YAML file describes, with the fields of ChatFormat.

    Spans, keys and tags are lists. Raises UserError for an unknown field and for a wrong value, naming it by `where`.
    """
    form: ChatFormat = _read(ChatFormat, value, where)
    if form.calls and form.calls.body is Body.tagged and not all(text.strip() for text in form.calls.tag[:3]):
        raise UserError(f"{where}.calls.tag is not complete: give {', '.join(Tag._fields[:3])}")
    return form


def _read(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}={_shown(value)} is not a mapping: give {_names(kind)}")
    hints = get_type_hints(kind)
    for name in value:
        if name not in hints:
            raise UserError(f"{where}.{shortened(str(name))} is not a field: there are {_names(kind)}")
    if kind is CallFormat and "body" not in value:
        raise UserError(f"{where}.body is missing: give one of {', '.join(Body)}")
    return kind(**{name: _field(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _field(hint: Any, value: Any, where: str) -> Any:
    """Return a field's value: a text, a number, a Body, a named tuple of texts, a list of these, or a CallFormat."""
    if hint == tuple[Span, ...]:
        return tuple(_field(Span, item, f"{where}[{i}]") for i, item in enumerate(_list(value, where)))
    kinds = [kind for kind in getattr(hint, "__args__", (hint,)) if kind is not NoneType]
    kind: Any = str if hint == tuple[str, ...] else kinds[0]
    if value is None and kinds != [hint]:
        return None
    if kind is CallFormat:
        return _read(CallFormat, value, where)
    if kind is Body:
        if not isinstance(value, str) or value not in list(Body):
            raise UserError(f"{where}={_shown(value)} is not allowed: give one of {', '.join(Body)}")
        return Body(value)
    if kind in (int, bool):
        if type(value) is not kind or value != 1:
            raise UserError(f"{where}={_shown(value)} is not allowed: give {kind(1)}, or leave it out")
        return value
    if hint is str:
        return _text(value, where)
    if hint == tuple[str, ...]:
        return tuple(_text(item, where) for item in _list(value, where))
    may_be_null = [NoneType in getattr(hint, "__args__", ()) for hint in get_type_hints(kind).values()]
    texts = [
        None if item is None and may else _text(item, where)
        for item, may in zip_longest(_list(value, where), may_be_null[: len(value)], fillvalue=False)
    ]
    if len(texts) > len(kind._fields):
        raise UserError(f"{where} has {len(texts)} texts: give {', '.join(kind._fields)}")
    return kind(*texts)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{where}={_shown(value)} is not a list")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_LITERAL:
        raise UserError(f"{where}={_shown(value)} is not a text of at most {MAX_LITERAL} characters")
    return value


def _shown(value: Any) -> str:
    """Return a value for an error. Aliases may make a container endless, so its type is shown."""
    return shortened(repr(value)) if isinstance(value, str | int | float | None) else type(value).__name__


def _names(kind: type) -> str:
    return ", ".join(item.name for item in fields(kind))
