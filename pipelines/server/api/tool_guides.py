"""Guides (grammars) of answers that call tools or reason, by the description of the model's chat format."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from conf.guides import CALL_SPACING
from models.chat.description import Body, CallFormat, ChatFormat
from models.tokenizers.base import Tool
from pipelines.server.api.call_arguments import ArgumentRules
from pipelines.server.api.call_rules import ANY_TEXT, BLANKS, Literals, Rules, either, joined, quoted, regex
from pipelines.server.api.errors import ApiError, bad_request
from pipelines.server.api.tool_schemas import Parameters

MAX_COUNTED = 8
"""Most calls of an answer whose form counts them: every call then has rules with its number."""
MAX_CALLS = 64
"""Most calls of another answer. Weak models repeat a call without end."""
CALL_ID = "/[a-zA-Z0-9]{9}/"
QUOTED_ID = r'/"[a-zA-Z0-9]{9}"/'
"""The ids that Mistral's models write."""
LINES = r"/(?s:[ \t\r\n]*|.*\n)/"
"""The text before a line."""
HARMONY_NEXT = "<|start|>assistant"


def tool_guide(
    form: ChatFormat,
    tools: Mapping[int, Tool],
    literal: Literals,
    is_required: bool,
    is_parallel: bool,
    begun: str = "",
    guide: dict[str, Any] | None = None,
    next_id: int = 0,
) -> dict[str, Any]:
    """Return the setting `guide` for answers that call tools.

    `tools`: the callable tools, by their index in the request. `is_required`: the answer consists of reasoning and
    calls. Otherwise it is any text, or a text of `guide`, or calls, also behind any text, and only the schemas of
    strict tools are enforced. `is_parallel`: several calls are allowed. `begun`: the literal with which the prompt
    begins the answer, for example the opening of the reasoning. `next_id`: number of the conversation's calls.

    Raises ApiError (400) if the format's calls, or a tool's schema, have no grammar here.
    """
    if form.calls is None or form.calls.body in (Body.chatglm3, Body.elements):
        message = f"calls in this model's format ({form.calls and form.calls.body}) cannot be enforced"
        raise bad_request(f"{message}: give tool_choice=auto, and neither strict nor parallel_tool_calls", "tools")
    answer = AnswerRules(form, Rules(literal), begun)
    calls = CallRules(form.calls, answer.rules, tools, is_required, is_parallel, next_id)
    try:
        start = answer.start(calls, is_required, guide)
    except RecursionError as error:
        raise bad_request("the tools' parameters have too many levels: simplify them", "tools") from error
    return answer.guide(start)


def after_reasoning(guide: dict[str, Any], form: ChatFormat, literal: Literals, begun: str = "") -> dict[str, Any]:
    """Return the guide of an answer without calls, with the format's reasoning and literals around it.

    Raises ApiError (400) for a kind of guide that cannot follow reasoning.
    """
    answer = AnswerRules(form, Rules(literal), begun)
    return answer.guide(answer.start(None, False, guide))


class CallRules:
    """The rules of calls."""

    def __init__(
        self,
        form: CallFormat,
        rules: Rules,
        tools: Mapping[int, Tool],
        is_required: bool,
        is_parallel: bool,
        next_id: int,
    ) -> None:
        """Arguments: as for `tool_guide`."""
        self.form, self._rules, self._next_id = form, rules, next_id
        is_many = bool(form.separator or form.opening) or form.body is Body.harmony
        self._is_repeated = is_parallel and form.max_calls is None and is_many
        self._is_counted = "{index}" in form.id_form
        self._writer = ArgumentRules(form, rules)
        self._tools = list[tuple[str, Parameters]]()
        for i, tool in tools.items():
            function, param = tool["function"], f"tools[{i}].function.parameters"
            is_enforced = is_required or bool(function.get("strict"))
            parameters = Parameters.of_tool(function, param) if is_enforced else Parameters({"type": "object"}, param)
            self._tools.append((function["name"], parameters))

    @property
    def sign(self) -> str:
        """The literal by which the reader knows that calls begin; "" if they begin an answer."""
        return self.form.opening.strip().split("\n")[0].strip()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._tools]

    def after(self, sign: str) -> str:
        """Return the expression of calls behind `sign`, which is the beginning of their opening literal."""
        form, literal = self.form, self._rules.literal
        first = literal((form.section.open + form.call.open).lstrip().removeprefix(sign))
        close, between = literal(form.section.close), literal(form.separator + form.call.open)
        if form.body is Body.harmony:  # every call is a message
            first, close, between = "", "", literal(harmony_messages(form).call_end + HARMONY_NEXT)
        if not self._is_repeated:
            return joined(first, self._call(0), close)
        if not self._is_counted:
            call = self._call(0)
            return joined(first, call, f"({joined(between, call)}){{0,{MAX_CALLS - 1}}}", close)
        more = ""
        for index in reversed(range(1, MAX_COUNTED)):
            more = f"({joined(between, self._call(index), more)})?"
        return joined(first, self._call(0), more, close)

    def _call(self, index: int) -> str:
        """Return the expression of a call from its name on. `index`: its place in the answer."""
        if self.form.body is Body.object and not self.form.opening.strip():
            # The answer's text may be an object too. llguidance then needs the same lexemes for both.
            calls = [self._writer.object_call(name, parameters) for name, parameters in self._tools]
        else:
            calls = [
                joined(self._header(name, index), self._writer.arguments(parameters), self._tail())
                for name, parameters in self._tools
            ]
        form = self.form
        close = form.call.close + (form.section.close if form.body is Body.harmony else "")
        return self._rules.rule(joined(either(calls), self._rules.literal(close)), "call")

    def _header(self, name: str, index: int) -> str:
        """Return the expression of what precedes the arguments of a call."""
        form, literal = self.form, self._rules.literal
        keys = form.keys
        number = index + (self._next_id if form.body is Body.json else 0)
        id = form.id_form.replace("{name}", name).replace("{index}", str(number))
        match form.body:
            case Body.object if keys.name is None:
                return literal("{" + json.dumps(name) + ": ")
            case Body.object:
                first = f"{json.dumps(keys.id)}: {json.dumps(id)}, " if keys.id and id else ""
                return literal(f'{{{first}"{keys.name}": {json.dumps(name)}, "{keys.arguments}": ')
            case Body.json if form.id_open:
                return joined(literal(name + form.id_open), CALL_ID, literal(form.name_close))
            case Body.json:
                return literal((id or name) + form.name_close)
            case Body.harmony:
                opening = form.section.open + form.call.open
                header = harmony_messages(form).call.replace("{name}", name)
                return literal(header + (opening + name + form.name_close if opening else ""))
            case Body.tagged:
                return literal(name + form.name_close)
        return literal(name)

    def _tail(self) -> str:
        """Return the expression of what follows the arguments of a call, before the literals around it."""
        form = self.form
        if form.body is not Body.object:
            return ""
        if form.keys.id and not form.id_form:
            return joined(f"({quoted(f', {json.dumps(form.keys.id)}: ')} {QUOTED_ID})?", '"}"')
        return '"}"'


class AnswerRules:
    """The rules of an answer: reasoning, then calls or text."""

    def __init__(self, form: ChatFormat, rules: Rules, begun: str) -> None:
        self._form, self.rules, self._begun = form, rules, begun

    def guide(self, start: str) -> dict[str, Any]:
        return {"lark": "\n".join([f"start: {start}", *self.rules.lines])}

    def start(self, calls: CallRules | None, is_required: bool, guide: dict[str, Any] | None) -> str:
        """Return the expression of an answer."""
        if self._form.calls and self._form.calls.body is Body.harmony:
            return self._harmony(calls, is_required, guide)
        if calls and self._begun and self._begun == calls.form.call.open:
            return calls.after((calls.form.section.open + self._begun).lstrip())
        if is_required:
            assert calls
            answers = [calls.after("")]
        elif guide is not None:
            before, behind = self._answer_literals()
            answers = [calls.after("")] if calls else []
            answers.append(joined(before, self._guided(guide), behind))
        else:
            assert calls
            answers = self._free_answers(calls)
        answer = joined(self._reasoning(), f"{BLANKS}?", either(answers))
        return either([answer, *self._calls_in_reasoning(calls)] if calls else [answer])

    def _reasoning(self) -> str:
        """Return the expression of the reasoning: of its rest if the prompt begins it, else optional; "" if none."""
        opening = self._reasoning_opening()
        if opening is None:
            return ""
        assert self._form.reasoning
        rest = self.rules.until(self._form.reasoning.close.strip())
        return f"({opening} {rest})?" if opening else rest

    def _reasoning_opening(self) -> str | None:
        """Return the expression of the reasoning's opening; "" if the prompt has it; None if there is no reasoning.

        A model whose vocabulary has no token for the opening may share the format of another that reasons. It would
        reason without end, because nothing else than calls may follow.
        """
        span = self._form.reasoning
        if span is None or not span.close.strip() or span.close.strip() in self._begun:
            return None
        open = span.open.strip()
        is_begun = not open or self._begun.strip().endswith(open)
        if is_begun:
            return ""
        return f"{BLANKS}? {self.rules.literal(open)}" if self.rules.literal.has_token(open) else None

    def _calls_in_reasoning(self, calls: CallRules) -> list[str]:
        """Return the expression of calls in reasoning that is not closed, where the reader takes them: at a line."""
        opening, sign = self._reasoning_opening(), calls.sign
        if opening is None or not sign:
            return []
        parts = self.rules.literal.parts(sign)
        if len(parts) > 1 and not parts[0].startswith("<["):
            return []
        return [joined(opening, self.rules.until(sign, LINES, is_limited=True), calls.after(sign))]

    def _free_answers(self, calls: CallRules) -> list[str]:
        """Return the expressions of any text, and of calls behind any text."""
        sign = calls.sign
        text = self._free_text(calls)
        literals = self._answer_literals()
        before, behind = (literal if "<[" in literal else "" for literal in literals)  # the text holds other literals
        if not sign:
            return [calls.after(""), joined(before, text, behind)]
        parts = self.rules.literal.parts(sign)
        plain = joined(before, text, behind)
        if len(parts) > 1 and not parts[0].startswith("<["):  # the text may hold the beginning of the sign
            begun_sign = self.rules.rule(text, "until", f"[suffix={parts[0]}]")
            plain = joined(before, f"{begun_sign}*", text, behind)
        rest = calls.after(sign)
        answer = self._form.answer
        if answer and answer.open.startswith(sign):  # a text has the same beginning as calls
            rest = either([rest, joined(self.rules.literal(answer.open.removeprefix(sign)), ANY_TEXT)])
        return [joined(before, self.rules.until(sign, text), rest), plain]

    def _free_text(self, calls: CallRules) -> str:
        """Return the expression of texts that begin neither with reasoning nor with a call without an opening."""
        span, form = self._form.reasoning, calls.form
        others = []
        if span and self._reasoning_opening():
            open = span.open.strip()
            others += [rf"[ \t\r\n]*{re.escape(open)}"] if len(self.rules.literal.parts(open)) == 1 else []
        if not form.opening.strip():
            by_name = "|".join(re.escape(name) for name in calls.names)
            others.append(
                r"[{\[ \t\r\n]" if form.body in (Body.object, Body.python) else rf"[ \t\r\n]|({by_name})[ \r]*\n"
            )
        if not others:
            return ANY_TEXT
        excluded = "|".join(others).replace("/", r"\/")
        return self.rules.rule(rf"{ANY_TEXT} & ~/(?s:({excluded}).*)/", "SAID")

    def _answer_literals(self) -> list[str]:
        """Return the expressions of the optional literals around an answer's text."""
        texts = [text.strip() for text in self._form.answer or ()]
        return [f"({self.rules.literal(text)} {BLANKS}?)?" if text else "" for text in texts] or ["", ""]

    def _guided(self, guide: dict[str, Any]) -> str:
        """Return the expression of the texts that a guide allows."""
        ((kind, value),) = guide.items()
        match kind:
            case "json_schema" | "json_object":
                schema = value if kind == "json_schema" else {"type": "object"}
                text = json.dumps({**schema, "x-guidance": CALL_SPACING}, ensure_ascii=False)
                return self.rules.rule(f"%json {text}", "answer")
            case "regex":
                return self.rules.rule(f"/{regex(value)}/", "answer")
            case "choice":
                return either(map(quoted, value))
        raise _refused_guide()

    def _harmony(self, calls: CallRules | None, is_required: bool, guide: dict[str, Any] | None) -> str:
        """Return the expression of messages: reasoning, and calls or the final one."""
        assert self._form.calls
        texts = harmony_messages(self._form.calls)
        literal, until = self.rules.literal, self.rules.until
        thought = joined(literal(texts.reasoning), until(texts.end + HARMONY_NEXT))
        begun = until(texts.end + HARMONY_NEXT) if self._begun.strip().endswith(texts.reasoning.strip()) else ""
        forms = []
        if calls:
            forms.append(joined(calls.after(""), f"({literal(texts.call_end)})?"))
        if not is_required:
            text = ANY_TEXT if guide is None else self._guided(guide)
            forms.append(joined(literal(texts.final), text, f"({literal(texts.final_end)} | {literal(texts.end)})?"))
        preamble = joined(literal(texts.preamble), until(texts.end + HARMONY_NEXT))
        before = f"({thought} | {preamble})*" if calls and not is_required and guide is None else f"({thought})*"
        return joined(begun, before, either(forms))


class HarmonyMessages(NamedTuple):
    """The headers and ends of messages in a format of body harmony."""

    reasoning: str
    end: str
    preamble: str
    """Header of text before calls."""
    final: str
    final_end: str
    call: str
    call_end: str


def harmony_messages(form: CallFormat) -> HarmonyMessages:
    if form.tag.key_open:
        user = " to=user<|message|>"
        return HarmonyMessages(
            " to=self<|message|>", "<|eom|>", user, user, "<|eot|>", " to={name}<|message|>", "<|eom|>"
        )
    call = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    thought, text, final = (f"<|channel|>{channel}<|message|>" for channel in ("analysis", "commentary", "final"))
    return HarmonyMessages(thought, "<|end|>", text, final, "<|return|>", call, "<|call|>")


def _refused_guide() -> ApiError:
    message = "a Lark grammar can stand neither behind reasoning nor beside tools"
    remedy = "give a JSON schema, a regular expression or a choice, or leave tools out and turn the reasoning off"
    return bad_request(f"{message}: {remedy}", "structured_outputs")
