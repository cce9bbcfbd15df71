"""Guides that make an answer call tools, in the format of the model's family, with arguments that fit the tools' schemas."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from conf.guides import CALL_SPACING
from conf.json_schemas import prepared
from models.tokenizers.base import Tokenizer, Tool
from pipelines.api.errors import bad_request, not_allowed

ANY_TEXT = r"(.|\n)*"


@dataclass(frozen=True)
class CallGrammar:
    """How a family writes calls: opening, calls with separators between them, closing."""

    argument_key: str | None
    """The key of the arguments in an object with the name; None where the name stands before the arguments."""
    sign: str = ""
    """The literal by which a reader knows that a call begins; "" where it is the answer's first character."""
    opening: str = ""
    """What follows the sign."""
    closing: str = ""
    separator: str | None = None
    """None where there is one call at most."""
    named: tuple[str, str] = ("", "")
    """What stands before and after the name, where it stands before the arguments."""
    counted: str = ""
    """What stands between the name and the number of a call, where calls have numbers."""


CALL_TOKENS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
    *(f"<|tool_{name}|>" for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end")),
    "<|tool_calls_section_end|>",
)
"""Texts in calls that vocabularies may have as special tokens."""


class Literals:
    """Writes literals for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = {name: tokenizer.special_token_id(name) for name in CALL_TOKENS}
        self._special_ids = {name: id for name, id in ids.items() if id is not None}

    def __call__(self, text: str) -> str:
        """Return a text as an expression, the special tokens in it as tokens."""
        for name, id in self._special_ids.items():
            before, found, after = text.partition(name)
            if found:
                return " ".join(part for part in (self(before), f"<[{id}]>", self(after)) if part)
        return json.dumps(text, ensure_ascii=False) if text else ""


GRAMMARS = {
    "hermes": CallGrammar("arguments", "<tool_call>", "\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n"),
    "llama3": CallGrammar("parameters"),
    "mistral": CallGrammar("arguments", "[TOOL_CALLS]", " [", "]", ", "),
    "deepseek": CallGrammar(
        None,
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>",
        ("function<｜tool▁sep｜>", "\n```json\n"),
    ),
    "kimi": CallGrammar(
        None,
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_end|><|tool_call_begin|>",
        ("functions.", "<|tool_call_argument_begin|>"),
        ":",
    ),
    "glm4": CallGrammar(None, named=("", "\n")),
}
"""By the names of `models.tokenizers.answers.FORMATS`; the others have none."""


def tool_guide(
    form: str, tools: Mapping[int, Tool], literal: Literals, is_required: bool, is_parallel: bool, reasons: bool
) -> dict[str, Any]:
    """Return the setting `guide` of answers that call tools.

    tools: those that may be called, by their numbers in the request.
    is_required: the answer is calls alone; else it may be any text, or text and calls after it, and only strict tools' schemas hold.
    is_parallel: there may be several calls. reasons: the prompt ends where the reasoning begins, which is written first.

    Raises ApiError (400) where the family's calls have no grammar here.
    """
    grammar = GRAMMARS.get(form)
    if grammar is None or not (is_required or grammar.sign or grammar.argument_key):
        message = f"calls in this model's format ({form}) cannot be enforced so"
        raise bad_request(f"{message}: give tool_choice=auto, and neither strict nor parallel_tool_calls", "tools")
    several = f"({literal(grammar.separator)} call)*" if is_parallel and grammar.separator else ""
    rules = [
        _start(grammar, literal, is_required, reasons),
        f"calls: {_joined(literal(grammar.opening), 'call', several, literal(grammar.closing))}",
        f"call: {' | '.join(f'call_{i}' for i in tools)}",
    ]
    for i, tool in tools.items():
        rules.append(f"call_{i}: {_joined(_name(grammar, literal, tool), f'value_{i}')}")
        has_schema = is_required or bool(tool["function"].get("strict"))
        parameters = (
            _parameters(tool["function"], f"tools[{i}].function.parameters") if has_schema else {"type": "object"}
        )
        schema = _value(tool["function"]["name"], parameters, grammar.argument_key)
        rules.append(f"value_{i}: %json {json.dumps(schema, ensure_ascii=False)}")
    return {"lark": "\n".join(rules)}


def _name(grammar: CallGrammar, literal: Literals, tool: Tool) -> str:
    """Return the expression of what stands before the arguments; "" where the name is in an object with them."""
    if grammar.argument_key:
        return ""
    before, after = grammar.named
    named = before + tool["function"]["name"] + grammar.counted
    return f"{literal(named)} /[0-9]+/ {literal(after)}" if grammar.counted else literal(named + after)


def after_reasoning(guide: dict[str, Any]) -> dict[str, Any]:
    """Return the guide of an answer whose reasoning the prompt has begun. Raises ApiError (400) for a kind that cannot stand after it."""
    ((kind, value),) = guide.items()
    if kind not in ("json_schema", "json_object"):
        message = "the model reasons before it answers, and only a JSON schema can follow that"
        raise bad_request(f"{message}: give response_format, or turn its reasoning off", "structured_outputs")
    schema = {"type": "object"} if kind == "json_object" else value
    return {
        "lark": f"start: think answer\n{_THINK}\nanswer: %json {json.dumps({**schema, 'x-guidance': CALL_SPACING}, ensure_ascii=False)}"
    }


_THINK = r"""think: thought BLANKS?
thought[lazy]: /(.|\n)*<\/think>/
BLANKS: /[ \n]+/"""


def _start(grammar: CallGrammar, literal: Literals, is_required: bool, reasons: bool) -> str:
    sign = literal(grammar.sign)
    if is_required:
        return f"start: think {sign} calls\n{_THINK}" if reasons else f"start: {sign} calls"
    if not sign:
        return f"start: calls | SAID\nSAID: /([^{{ \\t\\r\\n]{ANY_TEXT})?/"
    if sign.startswith("<["):  # a token that no text writes
        return f"start: SAID {sign} calls | SAID\nSAID: /{ANY_TEXT}/"
    return f"start: said calls | SAID\nsaid[lazy]: /{ANY_TEXT}{_escaped(grammar.sign)}/\nSAID: /{ANY_TEXT}/"


def _escaped(text: str) -> str:
    return re.sub(r"[][|]", r"\\\g<0>", text)  # what signs have of a regular expression's letters


def _parameters(function: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, which are an object always. Raises ApiError for another type.

    An `$id` makes it a separate document, so that "#/$defs/a" refers to the tool's own definitions.
    """
    schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise not_allowed(f"{param}.type", kind, "the arguments of a call are an object: give 'object'")
    try:
        return {"$id": "tool:parameters", **prepared(schema), "type": "object"}
    except UserError as error:
        raise bad_request(f"{param} cannot be used: {error}", param) from error


def _value(name: str, parameters: dict[str, Any], argument_key: str | None) -> dict[str, Any]:
    """Return the JSON schema of what a call holds: the arguments, or an object of name and arguments."""
    if argument_key is None:
        return {**parameters, "x-guidance": CALL_SPACING}
    both = {"name": {"const": name}, argument_key: parameters}
    return {
        "type": "object",
        "properties": both,
        "required": list(both),
        "additionalProperties": False,
        "x-guidance": CALL_SPACING,
    }


def _joined(*expressions: str) -> str:
    return " ".join(filter(None, expressions))
