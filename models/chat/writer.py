"""Write tool calls as a model writes them, by the description of its chat format."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.chat.description import Body, CallFormat
from models.chat.elements import write_element


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


def write_calls(form: CallFormat, calls: Sequence[Call]) -> str:
    """Return the calls of one answer as text."""
    bodies = [_body(form, call, index) for index, call in enumerate(calls)]
    if form.body is Body.harmony:
        return "<|start|>assistant".join(bodies)
    texts = [form.call.open + body + form.call.close for body in bodies]
    return form.section.open + form.separator.join(texts) + form.section.close


def _body(form: CallFormat, call: Call, index: int) -> str:
    """Return a call without the literals around it. `index`: its place in the answer."""
    arguments = _json(call.arguments)
    match form.body:
        case Body.object:
            return _object(form, call, index)
        case Body.json:
            name = _id(form, call, index) if form.id_form else call.name
            return f"{name}{form.id_open}{call.id or '' if form.id_open else ''}{form.name_close}{arguments}"
        case Body.gemma:
            return call.name + _gemma(call.arguments, form.quote)
        case Body.python:
            return f"{call.name}({', '.join(f'{key}={_json(value)}' for key, value in call.arguments.items())})"
        case Body.harmony if form.tag.key_open:
            text = form.section.open + form.call.open + _tagged_call(form, call) + form.call.close + form.section.close
            return f" to={call.name}<|message|>{text}<|eom|>"
        case Body.harmony:
            header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
            return f"{header}{arguments}<|call|>"
        case Body.chatglm3:
            keywords = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
            return f"{call.name}\n```python\ntool_call({keywords})\n```"
        case Body.elements:
            items = (write_element(form.tag.key_open, *item) for item in call.arguments.items())
            return call.name + form.name_close + "".join(f"\n{text}" for text in items)
        case Body.tagged:
            return _tagged_call(form, call)


def _id(form: CallFormat, call: Call, index: int) -> str:
    return form.id_form.replace("{name}", call.name).replace("{index}", str(index))


def _object(form: CallFormat, call: Call, index: int) -> str:
    keys = form.keys
    if keys.name is None:
        return _json({call.name: call.arguments})
    fields: dict[str, Any] = {}
    if keys.id and form.id_form:
        fields[keys.id] = _id(form, call, index)
    fields |= {keys.name: call.name, keys.arguments: call.arguments}
    if keys.id and call.id and not form.id_form:
        fields[keys.id] = call.id
    return _json(fields)


def _tagged_call(form: CallFormat, call: Call) -> str:
    return call.name + form.name_close + "".join(_tagged(form, *item) for item in call.arguments.items())


def _tagged(form: CallFormat, key: str, value: Any) -> str:
    tag, is_text = form.tag, isinstance(value, str)
    key_close = tag.is_string if is_text and tag.is_string else tag.key_close
    return tag.key_open + key + key_close + (value if is_text else _json(value)) + tag.value_close


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(item, quote) for item in value) + "]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
