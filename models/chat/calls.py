"""Read tool calls while they arrive, in the bodies of `description.Body`."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.chat.description import Body, CallFormat
from models.chat.elements import read_element
from models.chat.parts import PartWriter
from models.chat.schemas import Parameters, is_string
from models.chat.stream import SPACE, Reading, Sink, TextStream
from models.chat.values import (
    Malformed,
    closing_brackets,
    is_json,
    json_of,
    json_of_literal,
    read_gemma_object,
    read_json_string,
    read_json_value,
    read_python_arguments,
)

FENCE = "```"
MAX_LITERALS = 8
"""Most literals before the first call. A weak model may repeat an opening thousands of times."""
MAX_READ_AGAIN = 1 << 16
"""Most characters of an answer that seemed to be calls and are read again as text. After them nothing is a call."""
MAX_NAME = 300
"""Most characters of the text before the arguments."""
NAME = re.compile(r"[\w.-]+")
LISTED = (Body.object, Body.python)
"""Bodies whose calls may stand in a list."""
WRAPPER = "function"
"""Key of an object around the name and the arguments, as in OpenAI's messages."""
ARGUMENT_KEYS = ("arguments", "parameters")
AT_LINE_START = "\n{"
"""Where a bare call may begin behind text."""


@dataclass(frozen=True)
class Tools:
    """The tools that an answer may call."""

    parameters: Mapping[str, Parameters | None]
    """The schema of the arguments by the tool's name."""
    max_calls: int | None = None
    """Calls beyond this number are dropped."""


class CallReader:
    """Reads the calls of one answer."""

    def __init__(self, form: CallFormat, tools: Tools, stream: TextStream, writer: PartWriter) -> None:
        self._form, self._tools, self._stream, self._writer = form, tools, stream, writer
        self._num_started = 0
        self._num_read_again = 0
        self._name, self._arguments = "", ""
        self._call_open = literals(form.call.open)
        self._call_close = literals(form.call.close)
        self._section_open = self._around_list(form.section.open)
        self._section_close = [text for span in (form.section, *form.aliases) for text in self._around_list(span.close)]
        self._is_bare = form.is_bare or not form.opening.strip()
        self.is_cut = False
        """Whether the answer reached its length limit."""
        self.has_cut_call = False
        """Whether the arguments of a call are incomplete."""

    @property
    def openings(self) -> tuple[str, ...]:
        """The literals at which calls begin."""
        first = self._section_open[:1] or self._call_open[:1]
        texts = first + [text for span in self._form.aliases for text in self._around_list(span.open)[:1]]
        return (*texts, AT_LINE_START) if self._is_bare and self._form.body is Body.object else tuple(texts)

    def read(self, opening: str, text_sink: Sink) -> Reading[bool]:
        """Read the calls behind a literal of `openings`. Return False if there are none: the literal is text then."""
        if self._num_read_again < MAX_READ_AGAIN:
            self._stream.mark(len(opening))
            self._stream.position -= opening == AT_LINE_START
            if (yield from self._has_calls(opening)):
                return True
            self._num_read_again += self._stream.reset()
            self._stream.position += len(opening)
        text_sink(opening)
        return False

    def read_bare(self) -> Reading[bool]:
        """Read the calls of an answer that begins with them, without a literal. Return False if it does not."""
        if not self._is_bare or self._num_read_again >= MAX_READ_AGAIN:
            return False
        self._stream.mark()
        yield from self._stream.skip()
        if (yield from self._may_begin()) and (yield from self._has_calls("")):
            return True
        self._num_read_again += self._stream.reset()
        return False

    def start(self, name: str, id: str | None = None) -> None:
        """Pass on the beginning of a call. Raises Malformed for the name of no tool."""
        if name not in self._tools.parameters:
            raise Malformed
        self._stream.unmark()
        self._num_started += 1
        self._name, self._arguments = name, ""
        if not self._is_surplus:
            self._writer.begin_call(name, id)

    def read_json_arguments(self, ends: Sequence[str] = ()) -> Reading[None]:
        """Pass on the arguments of the started call.

        They may be an object, an object as a string, null, or nothing before a closing literal or one of `ends`.
        """
        yield from self._stream.skip()
        char = yield from self._stream.peek()
        for text in (*ends, *self._call_close[:1], *self._section_close, *self._call_open[:1]):
            if (yield from self._stream.comes(text)):
                self._pass("{}")
                return
        if char == "{":
            self._complete((yield from read_json_value(self._stream, self._pass)))
            return
        value: list[str] = []
        is_complete = bool(char) and (yield from read_json_value(self._stream, value.append))
        self._pass(_object_text("".join(value)) if is_complete or not self.is_cut else "")
        self._complete(is_complete)

    @property
    def _is_surplus(self) -> bool:
        return self._tools.max_calls is not None and self._num_started > self._tools.max_calls

    def _pass(self, text: str) -> None:
        self._arguments += text
        if not self._is_surplus:
            self._writer.arguments(text)

    def _complete(self, is_complete: bool) -> None:
        """End a call's arguments. If the model ended its answer, brackets that are missing are added."""
        if not is_complete and not self.is_cut:
            self._pass(closing_brackets(self._arguments) if self._arguments else "{}")
        self.note_cut(not is_complete and not is_json(self._arguments))

    def note_cut(self, is_cut: bool) -> None:
        """Note whether the arguments of the last call are incomplete, unless the call is dropped."""
        self.has_cut_call |= is_cut and not self._is_surplus

    def _has_calls(self, opening: str) -> Reading[bool]:
        """Read calls. Return whether one was started."""
        num_before = self._num_started
        try:
            yield from self._read_calls(opening)
        except Malformed:
            if self._num_started > num_before and not self._stream.reset():
                self.note_cut(True)
        if self._num_started > num_before:
            self._stream.unmark()
        return self._num_started > num_before

    def _may_begin(self) -> Reading[bool]:
        """Return whether the answer's first characters may be a call, for formats without an opening literal."""
        body = self._form.body
        char = yield from self._stream.peek()
        if body in LISTED:
            return char == "[" or (char == "{" and body is Body.object)
        for name in sorted(self._tools.parameters, key=len, reverse=True):
            if (yield from self._stream.comes(name)):
                size = len(name)
                for ending in ("\n", "\r\n", " \n"):
                    if (yield from self._stream.comes(ending, size)):
                        return True
        return False

    def _read_calls(self, opening: str) -> Reading[None]:
        """Read calls up to the end of their section, or to text that is none.

        Behind a call the place where the next one begins is marked, until it is started.
        """
        stream, form = self._stream, self._form
        num_before = self._num_started
        is_open = not opening or opening in self._call_open[-1:]
        in_list = in_call = False
        for number in itertools.count():
            if number > MAX_LITERALS and self._num_started == num_before:
                raise Malformed
            yield from stream.skip()
            char = yield from stream.peek()
            if self._num_started > num_before and not in_call:
                stream.mark()
            if (yield from self._take_any([*self._section_open, form.separator.strip()])):
                continue
            if not char or (yield from self._take_any(self._section_close)):
                return
            if (yield from self._take_any(self._call_close)):
                is_open = in_call = False
            elif literal := (yield from self._take_any(self._call_open)):
                is_open, in_call = literal == self._call_open[-1], True
            elif form.body in LISTED and char in "[],;" and (char != "[" or self._num_started == num_before):
                stream.position += 1
                in_list = char == "[" or (in_list and char != "]")
            elif form.body in LISTED and char == "{":  # LFM2 also writes JSON, if the system message asks for it
                yield from self._read_object()
                in_call = False
            elif form.body in LISTED and char == "}" and self._num_started > num_before:
                stream.position += 1  # a bracket too many
            elif NAME.match(char) and (form.body is Body.python or (form.body is Body.object and in_list)):
                yield from self._read_python_call()
            elif is_open and form.body not in LISTED:
                yield from self._read_named_call()
                is_open = in_call = False
            elif self._num_started == num_before:
                raise Malformed
            else:
                self._skip_cut_closer()
                return

    def _skip_cut_closer(self) -> None:
        """Skip the beginning of a closing literal at which the answer was cut."""
        rest = self._stream.text[self._stream.position :]
        if self._stream.is_complete and any(text.startswith(rest) for text in self._call_close + self._section_close):
            self._stream.position = len(self._stream.text)

    def _around_list(self, text: str) -> list[str]:
        """Return the lines of a literal around all calls, without the bracket of a list."""
        return literals(text.strip().removesuffix("[").removeprefix("]") if self._form.body in LISTED else text)

    def _take_any(self, texts: list[str]) -> Reading[str]:
        """Read the first of the texts that comes next, and return it; "" if none does."""
        for text in texts:
            if (yield from self._stream.take(text)):
                return text
        return ""

    def _read_object(self) -> Reading[None]:
        """Read a call's JSON object. The name and the arguments may stand in an inner object `function`."""
        stream, keys = self._stream, self._form.keys
        stream.position += 1
        name, id, is_started, depth = "", None, False, 1
        early: list[str] = []  # arguments before the name
        while depth:
            yield from stream.skip(SPACE + ",")
            if (char := (yield from stream.peek())) == "}":
                stream.position += 1
                depth -= 1
                continue
            if not char or (is_started and char != '"'):
                break
            key = yield from self._read_key()
            if key == WRAPPER and not name and (yield from stream.take("{")):
                depth += 1
            elif keys.name is None or (key == keys.name and not name):
                name = key if keys.name is None else (yield from self._read_text())
                if name not in self._tools.parameters:
                    raise Malformed
                if keys.name is None or early:
                    self.start(name, id)
                    is_started = True
                    yield from self._read_arguments(early) if early else self.read_json_arguments()
            elif key in (keys.arguments, *ARGUMENT_KEYS) and not is_started:
                if not name:
                    yield from read_json_value(stream, early.append)
                    continue
                self.start(name, id)
                is_started = True
                yield from self.read_json_arguments()
            elif is_started or key in (keys.id, "id", "type", "name"):
                value: list[str] = []
                yield from read_json_value(stream, value.append)
                id = self._object_id("".join(value)) if key == keys.id else id
            else:
                raise Malformed
        if not is_started:
            if not name or self.is_cut:
                raise Malformed
            self.start(name, id)
            self._pass("{}")

    def _object_id(self, value: str) -> str | None:
        """Return the id in an object. None for a number that the model counts within an answer."""
        id = json.loads(value) if is_json(value) else None
        return id if isinstance(id, str) and not self._form.id_form else None

    def _read_key(self) -> Reading[str]:
        """Read a key and its colon, up to the value."""
        key = yield from self._read_text()
        yield from self._stream.skip()
        if not (yield from self._stream.take(":")):
            raise Malformed
        yield from self._stream.skip()
        return key

    def _read_text(self) -> Reading[str]:
        """Return the value of a JSON string. Raises Malformed for anything else."""
        text: list[str] = []
        if not (yield from self._stream.take('"')):
            raise Malformed
        if not (yield from read_json_string(self._stream, text.append, MAX_NAME)):
            raise Malformed
        try:
            return str(json.loads('"' + "".join(text)))
        except ValueError as error:
            raise Malformed from error

    def _read_arguments(self, early: list[str]) -> Reading[None]:
        """Pass on arguments that stood before the name."""
        text = "".join(early)
        self._pass(text if text.startswith("{") else _object_text(text))
        self._complete(is_json(self._arguments))
        yield from ()

    def _read_named_call(self) -> Reading[None]:
        """Read a call whose name stands before its arguments."""
        match self._form.body:
            case Body.json:
                yield from self._start_named(literals(self._form.name_close)[-1:] or [self._form.name_close])
                yield from self.read_json_arguments()
            case Body.gemma:
                yield from self._start_named(["{"])
                self._stream.position -= 1
                self._complete((yield from read_gemma_object(self._stream, self._form.quote, self._pass)))
            case Body.elements:
                yield from self._read_elements()
            case Body.chatglm3:
                header: list[str] = []
                yield from self._stream.until(("\n",), header.append, MAX_NAME)
                for literal in (f"{FENCE}python", "tool_call"):
                    yield from self._stream.skip()
                    yield from self._stream.take(literal)
                arguments = yield from read_python_arguments(self._stream)
                self.start("".join(header).strip())
                self._pass(arguments)
                yield from self._stream.skip()
                yield from self._stream.take(FENCE)
            case _:
                yield from self._read_tagged_call()

    def _read_elements(self) -> Reading[None]:
        """Read a call whose arguments are elements. It is passed on when it is complete."""
        header: list[str] = []
        yield from self._stream.until((self._form.name_close,), header.append, MAX_NAME)
        name = "".join(header).strip()
        parameters = self._tools.parameters.get(name) or {}
        value = yield from read_element(self._stream, self._form.tag.key_open, parameters, parameters)
        self.start(name)
        self._pass(json_of(value if isinstance(value, dict) else {}))

    def _start_named(self, ends: list[str]) -> Reading[str]:
        """Read a name up to one of the literals, and start the call. Return the literal; "" at the answer's end."""
        text: list[str] = []
        end = yield from self._stream.until(tuple(ends), text.append, MAX_NAME)
        if not end and (self.is_cut or not self._stream.is_complete):
            raise Malformed
        self.start(*self._name_and_id("".join(text).strip()))
        return end

    def _name_and_id(self, header: str) -> tuple[str, str | None]:
        """Return the name and the id in the text before the arguments."""
        form, names = self._form, self._tools.parameters
        if form.id_open:
            name, _, id = header.partition(form.id_open)
            return name.strip(), id.strip() or None
        if not form.id_form or header in names:
            return header, None
        before = form.id_form.partition("{name}")[0]
        for name in sorted(names, key=len, reverse=True):  # models leave parts of the form out
            if re.fullmatch(
                rf"({re.escape(before)}|{re.escape(before.rstrip('.'))})?{re.escape(name)}:?[0-9]*", header
            ):
                is_exact = re.fullmatch(rf"{re.escape(before)}{re.escape(name)}:[0-9]+", header)
                return name, header if is_exact else None
        return header, None

    def _read_python_call(self) -> Reading[None]:
        text: list[str] = []
        if not (yield from self._stream.until(("(",), text.append, MAX_NAME)):
            raise Malformed
        self._stream.position -= 1
        name = "".join(text).strip()
        if name not in self._tools.parameters:
            raise Malformed
        arguments = yield from read_python_arguments(self._stream)
        self.start(name)
        self._pass(arguments)

    def _read_tagged_call(self) -> Reading[None]:
        """Read a name, and arguments between tags. The first of equal keys counts."""
        tag, stream = self._form.tag, self._stream
        key_open, name_close = tag.key_open.strip(), self._form.name_close.strip()
        ends = [text for text in (name_close, key_open, *self._call_close[:1]) if text]
        end = yield from self._start_named(ends)
        stream.position -= len(end) * (end != name_close)
        keys = set[str]()
        while True:
            yield from stream.skip()
            if (yield from stream.take(tag.value_close.strip())):  # a closing tag that the model repeats
                continue
            if not (yield from stream.take(key_open)):
                break
            yield from self._read_tagged_argument(keys)
        is_complete = bool((yield from stream.peek()))
        if is_complete or not self.is_cut:
            self._pass("}" if keys else "{}")
        self.note_cut(not is_json(self._arguments))

    def _read_tagged_argument(self, keys: set[str]) -> Reading[None]:
        tag, stream = self._form.tag, self._stream
        text: list[str] = []
        first, *others = literals(tag.key_close)
        ends = (first, tag.is_string.strip()) if tag.is_string else (first,)
        end = yield from stream.until(ends, text.append, MAX_NAME)
        key = "".join(text).strip()
        if not end:
            if not stream.is_complete:
                raise Malformed
            return
        for literal in others:
            yield from stream.skip()
            yield from stream.take(literal)
        if tag.key_close.endswith("\n"):
            yield from stream.take("\n")
        if tag.is_string is None:
            is_text = is_string(self._tools.parameters[self._name], key)
        else:
            is_text = end == tag.is_string.strip()
        is_new = key not in keys
        keys.add(key)
        sink: Sink = self._pass if is_new else lambda text: None
        sink(("{" if len(keys) == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        yield from self._read_tagged_value(sink, is_text)

    def _read_tagged_value(self, sink: Sink, is_text: bool) -> Reading[None]:
        """Pass on a value as JSON: pieces of a string as they arrive, other values as a piece."""
        stream, close = self._stream, self._form.tag.value_close
        value = Trimmed(sink if is_text else None, close.startswith("\n"))
        if is_text:
            sink('"')
        behind = [self._form.tag.key_open.strip(), close.strip(), *self._call_close, *self._section_close]
        while literal := (yield from stream.until((close.strip(),), value.add)):
            if (yield from stream.comes_after_space(filter(None, behind))):
                break
            value.add(literal)
        if literal or not self.is_cut:
            value.end(bool(literal))
            sink('"' if is_text else json_of_literal(value.text))


class Trimmed:
    """A value, without the line break at its end if the format adds one."""

    def __init__(self, sink: Sink | None, drops_line_break: bool) -> None:
        """`sink`: takes the value as the inside of a JSON string; None: `text` collects the value."""
        self._sink, self._drops_line_break = sink, drops_line_break
        self._held = ""
        self.text = ""

    def add(self, text: str) -> None:
        text = self._held + text
        size = len(text) - (self._drops_line_break and text.endswith("\n"))
        self._held = text[size:]
        self._put(text[:size])

    def end(self, is_closed: bool) -> None:
        if not is_closed:
            self._put(self._held)

    def _put(self, text: str) -> None:
        if self._sink is None:
            self.text += text
        elif text:
            self._sink(json.dumps(text, ensure_ascii=False)[1:-1])


def literals(text: str) -> list[str]:
    """Return the lines of a literal without white space. Models vary the white space between them."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def _object_text(value: str) -> str:
    """Return arguments that are no object as an object, if they hold one: `{}` for null, and the object in a string."""
    if not is_json(value):
        return value or "{}"
    inner = json.loads(value)
    if inner is None:
        return "{}"
    return inner if isinstance(inner, str) else value
