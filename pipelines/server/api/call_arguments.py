"""The rules of the arguments of a call, in the bodies of models.chat.description.Body, by a tool's schema."""

import json
import keyword
import re
from collections.abc import Iterator
from typing import Any

from conf.errors import shortened
from conf.guides import CALL_SPACING
from models.chat.description import Body, CallFormat
from models.chat.schemas import is_string
from models.chat.values import json_of_literal
from pipelines.server.api.call_rules import Rules, either, joined, quoted, searched
from pipelines.server.api.tool_schemas import Members, Parameters, Schema, has_only, kinds_of

INTEGER = "-?(0|[1-9][0-9]{0,18})"
NUMBER = rf"{INTEGER}(\.[0-9]{{1,17}})?([eE][+-]?[0-9]{{1,2}})?"
"""JSON numbers that a 64-bit float holds, without endless digits."""
SCALARS = {"integer": f"/{INTEGER}/", "number": f"/{NUMBER}/", "boolean": '("true" | "false")', "null": '"null"'}
KINDS = ["string", "number", "boolean", "null", "object", "array"]
IMPLIED = (("properties", ["object"]), ("additionalProperties", ["object"]), ("items", ["array"]))
"""The types that a schema without `type` means, by a keyword."""
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
BARE = r"""/(?s:[^ \t\r\n\-+0-9"'\[({.].*)/ & ~/(?s:[rRuU]["'].*|(true|false|null|True|False|None)[ \t]*([#,].*)?)/"""
"""Strings that are neither JSON nor Python literals."""
MAX_ITEMS = 256
"""Largest maxItems and minItems of an array that is written without JSON."""
DAY = "(0[1-9]|[12][0-9]|3[01])"
DATE = f"[0-9]{{4}}-(0[1-9]|1[0-2])-{DAY}"
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "ipv4": rf"{OCTET}(\.{OCTET}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Regular expressions of the formats that hold for strings without quotes. JSON Schema lets readers ignore others."""
FREE_KEYS = {
    Body.tagged: "[A-Za-z0-9_.-]{1,64}",
    Body.gemma: "[A-Za-z_][A-Za-z0-9_.-]{0,63}",
    Body.python: "[A-Za-z_][A-Za-z0-9_]{0,63}",
}
"""Regular expressions of names that a schema leaves free."""


class ArgumentRules:
    """Writes the rules of arguments in one format."""

    def __init__(self, form: CallFormat, rules: Rules) -> None:
        self._form, self._rules = form, rules
        self._body = Body.tagged if form.tag.key_open else form.body

    def arguments(self, parameters: Parameters) -> str:
        """Return the expression of a call's arguments. Raises ApiError (400) for a schema that cannot be followed."""
        if self._body not in FREE_KEYS:
            return self._rules.rule(_json(parameters.schema), "json")
        options = [self._object(parameters, option) for option in parameters.options(parameters.schema)]
        if not options:
            raise parameters.refuse("no object that satisfies it", "correct it")
        return self._rules.rule(either(options), "arguments")

    def object_call(self, name: str, parameters: Parameters) -> str:
        """Return the expression of a JSON object with the name and the arguments."""
        keys = self._form.keys
        # `$id` makes the parameters a separate document, so that "#/$defs/a" refers to their own definitions.
        inner = {"$id": "tool:parameters", **parameters.schema}
        both = {name: inner} if keys.name is None else {keys.name: {"const": name}, keys.arguments: inner}
        schema = {"type": "object", "properties": both, "required": list(both), "additionalProperties": False}
        return self._rules.rule(_json(schema), "object")

    def _object(self, parameters: Parameters, schema: Schema) -> str:
        """Return the expression of an object, of one alternative of a schema."""
        members = parameters.members(schema)
        writers = {Body.tagged: self._argument, Body.gemma: self._gemma_member, Body.python: self._keyword}
        write = writers[self._body]
        items = []
        for name, value in members.properties.items():
            if self._is_writable(name):
                items.append((write(parameters, name, "", value), name in members.required))
            elif name in members.required:
                raise parameters.refuse(f"the name {shortened(repr(name))}", "rename it")
        free = members.additional
        more = "" if free is None else write(parameters, "", self._free_key(members), free)
        match self._body:
            case Body.tagged:
                return joined(*(item if is_required else f"({item})?" for item, is_required in items), _many(more))
            case Body.gemma:
                return joined('"{"', self._listed(items, '","', more), '"}"')
            case _:
                return joined('"("', self._listed(items, '", "', more), '")"')

    def _is_writable(self, name: str) -> bool:
        """Whether the reader reads a property's name back."""
        match self._body:
            case Body.python:
                return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
            case Body.gemma:
                return bool(re.fullmatch(r"[^\s:{}\[\],\"]{1,200}", name)) and self._form.quote not in name
            case _:
                ends = [end.strip() for end in (self._form.tag.key_close, self._form.tag.is_string) if end]
                return 0 < len(name) <= 200 and name == name.strip() and not any(end in name for end in ends)

    def _free_key(self, members: Members) -> str:
        """Return the expression of all names that are not properties."""
        names = [*members.properties, *(keyword.kwlist if self._body is Body.python else ())]
        others = "|".join(re.escape(name) for name in names if re.fullmatch(FREE_KEYS[self._body], name))
        expression = f"/{FREE_KEYS[self._body]}/" + (f" & ~/({others})/" if others else "")
        return self._rules.rule(expression, "KEY")

    def _listed(self, items: list[tuple[str, bool]], separator: str, more: str) -> str:
        """Return the expression of members in order, with a separator between those that are written.

        `items`: the expressions, and whether each is required. `more`: the expression of any further ones.
        """
        others = _many(more and f"{separator} {more}")
        first = next((i for i, (_, is_required) in enumerate(items) if is_required), None)
        if first is not None:
            before = [f"({item} {separator})?" for item, _ in items[:first]]
            behind = [
                f"{separator} {item}" if needed else f"({separator} {item})?" for item, needed in items[first + 1 :]
            ]
            return joined(*before, items[first][0], *behind, others)
        starts = [joined(more, others)] if more else []
        for item, _ in reversed(items):
            name = self._rules.rule(item, "member")
            starts.append(joined(name, others))
            others = self._rules.rule(joined(f"({separator} {name})?", others), "rest")
        return f"({' | '.join(reversed(starts))})?" if starts else ""

    def _keyword(self, parameters: Parameters, name: str, key: str, schema: Any) -> str:
        """Return the expression of an argument of a Python call. `key`: the expression of a free name."""
        return joined(quoted(f"{name}=") if name else f'{key} "="', self._json_value(parameters, schema))

    def _json_value(self, parameters: Parameters, schema: Any) -> str:
        """Return the expression of a value as JSON that the readers of bare values take for the same value."""
        if (scalar := _scalar(schema)) is not None:
            return scalar
        return self._rules.rule(_json(parameters.self_contained(schema)), "json")

    def _argument(self, parameters: Parameters, name: str, key: str, schema: Any) -> str:
        """Return the expression of an argument between tags. `key`: the expression of a free name."""
        tag = self._form.tag
        text = self._text(parameters, schema, tag.value_close)
        value = joined(self._json_value(parameters, schema), self._rules.literal(tag.value_close))
        if tag.is_string is None:
            is_raw = is_string(parameters.schema, name) or has_only(schema)
            forms = [text] if is_raw else [*self._bare_forms(parameters, schema)] if text else [value]
            return joined(self._tagged(name, key, tag.key_close), either(forms))
        options = parameters.options(schema)
        has_others = any(kinds_of(option) != ["string"] for option in options)
        forms = [joined(self._tagged(name, key, tag.is_string), text)] if text else []
        forms += [joined(self._tagged(name, key, tag.key_close), value)] if has_others or not forms else []
        return either(forms)

    def _tagged(self, name: str, key: str, close: str) -> str:
        literal, key_open = self._rules.literal, self._form.tag.key_open
        return literal(key_open + name + close) if name else joined(literal(key_open), key, literal(close))

    def _text(self, parameters: Parameters, schema: Any, close: str) -> str:
        """Return the expression of the strings of a schema, without quotes, and of the literal behind; "" if none."""
        texts = []
        for option in parameters.options(schema):
            kinds = kinds_of(option)
            values = option.get("enum", [option["const"]] if "const" in option else None)
            if values is not None:
                texts += [
                    joined(quoted(value), self._rules.literal(close)) for value in values if isinstance(value, str)
                ]
            elif "string" in kinds or has_only(option):
                parameters.check(option)
                texts.append(self._until(close, option))
        return either(texts) if texts else ""

    def _bare_forms(self, parameters: Parameters, schema: Any) -> Iterator[str]:
        """Yield the expressions of a value that may be a string, where only its text shows its type.

        A lexeme has all bare texts: llguidance would not end `null` where another lexeme can go on.
        """
        close = self._rules.literal(self._form.tag.value_close)
        bare, words = list[str](), set[str]()
        for option in parameters.options(schema):
            values = option.get("enum", [option["const"]] if "const" in option else None)
            if values is not None:
                words |= {_bare_text(value) for value in values}
                continue
            for kind in kinds_of(option) or KINDS:
                if kind in ("null", "boolean"):
                    words |= {"null"} if kind == "null" else {"true", "false"}
                    continue
                yield joined(self._json_value(parameters, {**option, "type": kind}), close)
                if kind == "string":
                    bare.append(" & ".join([BARE, *(f"/{limit}/" for limit in _limits(option))]))
        others = "|".join("".join(map(_escaped, word)) for word in sorted(words))
        texts = [f"({text})" for text in bare] + ([f"/({others})/"] if others else [])
        if texts:
            close, line_break = _without_line_break(self._form.tag.value_close)
            value = joined(f"({' | '.join(texts)})", line_break and f"/{line_break}/")
            yield self._rules.until(close, self._rules.rule(value, "BARE"), is_limited=True)

    def _until(self, close: str, schema: Schema) -> str:
        """Return the expression of the strings with a schema's pattern, format and length, and of the literal behind."""
        limits = _limits(schema)
        close, line_break = _without_line_break(close)
        if not limits:
            return self._rules.until(close)
        expression = " & ".join(f"/({limit}){line_break}/" for limit in limits)
        text = expression if len(limits) == 1 else self._rules.rule(expression, "TEXT")
        return self._rules.until(close, text, is_limited=True)

    def _gemma_member(self, parameters: Parameters, name: str, key: str, schema: Any) -> str:
        value = self._gemma(parameters, schema)
        return joined(quoted(f"{name}:") if name else f'{key} ":"', value)

    def _gemma(self, parameters: Parameters, schema: Any) -> str:
        """Return the expression of a value in Gemma's form. Values with references are rules, which may recur."""
        if (scalar := _scalar(schema)) is not None:
            return scalar
        text = json.dumps(schema)
        if "$ref" not in text and not has_only(schema):
            return either(self._gemma_options(parameters, schema))
        name, is_new = self._rules.name(f"gemma {id(parameters) if '$ref' in text else ''} {text}", "value")
        if is_new:
            self._rules.put(name, either(self._gemma_options(parameters, schema)))
        return name

    def _gemma_options(self, parameters: Parameters, schema: Any) -> list[str]:
        options = [form for option in parameters.options(schema) for form in self._gemma_forms(parameters, option)]
        if not options:
            raise parameters.refuse("no value that satisfies it", "correct it")
        return options

    def _gemma_forms(self, parameters: Parameters, schema: Schema) -> list[str]:
        """Return the expressions of the values of an alternative, by type."""
        parameters.check(schema)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return [self._gemma_constant(value) for value in values]
        kinds = kinds_of(schema) or next((kinds for name, kinds in IMPLIED if name in schema), KINDS)
        return [self._gemma_kind(parameters, schema, kind) for kind in kinds]

    def _gemma_kind(self, parameters: Parameters, schema: Schema, kind: str) -> str:
        match kind:
            case "object":
                return self._object(parameters, schema)
            case "array":
                return self._gemma_list(parameters, schema)
            case "string":
                quote = self._form.quote
                return joined(self._rules.literal(quote), self._until(quote, schema))
        limits = {name: schema[name] for name in LIMITS if name in schema}
        if kind in ("integer", "number") and limits:
            return self._rules.rule(_json({"type": kind, **limits}), "json")
        if kind not in SCALARS:
            raise parameters.refuse(f"the type {shortened(kind)}", "correct it")
        return SCALARS[kind]

    def _gemma_list(self, parameters: Parameters, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not 0 <= least <= MAX_ITEMS or not 0 <= (most or 0) <= MAX_ITEMS:
            raise parameters.refuse(f"minItems or maxItems over {MAX_ITEMS}", "give less")
        if most == 0:
            return '"[]"'
        item = self._rules.rule(self._gemma(parameters, schema.get("items", {})), "item")  # it is written twice
        end = "" if most is None else max(most - 1, 0)
        more = f'("," {item}){{{max(least - 1, 0)},{end}}}'
        return joined('"["', f"{item} {more}" if least else f"({item} {more})?", '"]"')

    def _gemma_constant(self, value: Any) -> str:
        """Return the expression of one value."""
        if isinstance(value, str):
            return joined(self._rules.literal(self._form.quote), quoted(value), self._rules.literal(self._form.quote))
        if isinstance(value, dict):
            members = [joined(quoted(f"{key}:"), self._gemma_constant(item)) for key, item in value.items()]
            return joined('"{"', ' "," '.join(members), '"}"')
        if isinstance(value, list):
            return joined('"["', ' "," '.join(map(self._gemma_constant, value)), '"]"')
        return quoted(json.dumps(value))


def _without_line_break(close: str) -> tuple[str, str]:
    """Return a closing literal without the line break at its beginning, and a regular expression of the line break.

    The reader ends a value also at a literal without it, so the text of a value may not hold that.
    """
    return (close[1:], r"\n?") if close.startswith("\n") else (close, "")


def _limits(schema: Schema) -> list[str]:
    """Return the regular expressions of a string's length, pattern and format."""
    limits = []
    if "minLength" in schema or "maxLength" in schema:
        limits.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    if "pattern" in schema:
        limits.append(searched(schema["pattern"]))
    if (form := FORMATS.get(schema.get("format", ""))) is not None:
        limits.append(form)
    return limits


def _bare_text(value: Any) -> str:
    """Return the text that the reader of bare values takes for a value: a string without quotes if it may be so."""
    text = json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) and json_of_literal(value) == text else text


def _escaped(char: str) -> str:
    return char if char.isalnum() or not char.isascii() else f"\\x{ord(char):02x}"


def _scalar(schema: Any) -> str | None:
    """Return the expression of a number, a boolean or null, if a schema states no more than its type."""
    kinds = kinds_of(schema) if has_only(schema, "type") and isinstance(schema, dict) else []
    return SCALARS.get(kinds[0]) if len(kinds) == 1 else None


def _many(expression: str) -> str:
    return f"({expression})*" if expression else ""


def _json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': CALL_SPACING}, ensure_ascii=False)}"
