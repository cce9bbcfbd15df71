"""Guides (grammars) for tool calls in the format of a model family, with arguments that match the tools' schemas."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from conf.guides import CALL_SPACING
from conf.json_schemas import prepared
from models.tokenizers.base import Tokenizer, Tool
from pipelines.server.api.errors import bad_request, not_allowed

ANY_TEXT = r"(.|\n)*"


@dataclass(frozen=True)
class CallGrammar:
    """The format of a family's tool calls: sign, opening, calls with separators, closing."""

    argument_key: str | None
    """Key of the arguments in an object that also has the name. None if the name precedes the arguments."""
    sign: str = ""
    """Literal that marks the start of calls; "" if calls start at the answer's first character."""
    opening: str = ""
    """Text after the sign."""
    closing: str = ""
    separator: str | None = None
    """None if an answer has at most one call."""
    named: tuple[str, str] = ("", "")
    """Text before and after the name, if the name precedes the arguments."""
    counted: str = ""
    """Text between the name and the number of a call, if calls are numbered."""


CALL_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
    *(f"<|tool_{name}|>" for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end")),
    "<|tool_calls_section_end|>",
)
"""Parts of call formats that vocabularies may have as special tokens."""


class Literals:
    """Writes literals of a grammar for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = {name: tokenizer.special_token_id(name) for name in CALL_TOKENS}
        self._special_ids = {name: id for name, id in ids.items() if id is not None}

    def __call__(self, text: str) -> str:
        """Return a text as a grammar expression. Special tokens in it are written as tokens."""
        for name, id in self._special_ids.items():
            before, separator, after = text.partition(name)
            if separator:
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
"""By name in `models.tokenizers.answers.FORMATS`. The other formats have no grammar."""


def tool_guide(
    form: str, tools: Mapping[int, Tool], literal: Literals, is_required: bool, is_parallel: bool, reasons: bool
) -> dict[str, Any]:
    """Return the setting `guide` for answers that call tools.

    `tools`: the callable tools, by their index in the request. `is_required`: the answer consists of calls only.
    Otherwise it is any text, optionally with calls after it, and only the schemas of strict tools are enforced.
    `is_parallel`: several calls are allowed. `reasons`: the prompt ends where reasoning begins, so the answer starts
    with it.

    Raises ApiError (400) if the family's calls have no grammar here.
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
    """Return the expression of the text before the arguments; "" if the name is in one object with them."""
    if grammar.argument_key:
        return ""
    before, after = grammar.named
    named = before + tool["function"]["name"] + grammar.counted
    return f"{literal(named)} /[0-9]+/ {literal(after)}" if grammar.counted else literal(named + after)


def after_reasoning(guide: dict[str, Any]) -> dict[str, Any]:
    """Return the guide of an answer that starts with reasoning.

    Raises ApiError (400) for a kind of guide that cannot follow reasoning.
    """
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
    if sign.startswith("<["):  # a special token, which text cannot contain
        return f"start: SAID {sign} calls | SAID\nSAID: /{ANY_TEXT}/"
    return f"start: said calls | SAID\nsaid[lazy]: /{ANY_TEXT}{_escaped(grammar.sign)}/\nSAID: /{ANY_TEXT}/"


def _escaped(text: str) -> str:
    return re.sub(r"[][|]", r"\\\g<0>", text)  # the regex metacharacters that occur in signs


def _parameters(function: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, always an object. Raises ApiError for another type.

    `$id` makes the schema a separate document. "#/$defs/a" then refers to the tool's own definitions.
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
