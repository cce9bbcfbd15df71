"""Grammars of forced calls: what the models write matches, and what matches is read back. For every format."""

import json
import random
from typing import Any

import pytest
from llguidance import regex_to_lark

from conf.errors import UserError
from models.chat.calls import Tools
from models.chat.description import Body, ChatFormat
from models.chat.entries import entries
from models.chat.parts import CallArguments, CallStart, Content
from models.chat.reader import AnswerReader
from models.chat.writer import Call, write_calls
from models.tokenizers.base import Tool
from pipelines.server.api.call_rules import Literals, regex
from pipelines.server.api.errors import ApiError
from pipelines.server.api.tool_guides import after_reasoning, tool_guide
from tests.helpers.cases import each
from tests.helpers.grammars import Grammar, Vocabulary

FORMS = {
    name: entry.form
    for name, entry in entries().items()
    if entry.form.calls and entry.form.calls.body not in (Body.chatglm3, Body.elements)
}
QUICK = [
    "gpt_oss",
    "glimmer",
    "gemma4",
    "qwen3_coder",
    "deepseek_v4",
    "kimi",
    "cohere",
    "lfm2",
    "llama3",
    "apertus",
    "glm4",
]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "next": {"$ref": "#/$defs/point"}},
    "required": ["x"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["c", "f"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "point": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[a-c]+$", "maxLength": 4},
            "is_new": {"type": ["boolean", "null"]},
            "note": {"type": ["string", "null", "number"]},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"point": POINT | {"additionalProperties": False}},
    },
    "any.thing": {"type": "object"},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "day": {
        "properties": {"when": {"type": "string", "format": "date"}, "inner": {"$ref": "#"}},
        "additionalProperties": False,
    },
}
ARGUMENTS: dict[str, Any] = {
    "city": 'a<b>\nü "q"',
    "days": 3,
    "unit": "c",
    "tags": ["x"],
    "point": {"x": 1.5, "next": {"x": 2}},
}
ID = "abcdefghi"
SAID = "@"
"""Stands for the text of an answer."""


def tools_of(schemas: dict[str, Any], strict: tuple[str, ...] = ()) -> dict[int, Tool]:
    functions = [{"name": name, "parameters": schema, "strict": name in strict} for name, schema in schemas.items()]
    return {i: {"type": "function", "function": function} for i, function in enumerate(functions)}


TOOLS = tools_of(SCHEMAS)


def grammar(form: ChatFormat, vocabulary: Vocabulary, *settings: Any, tools: Any = TOOLS, **more: Any) -> Grammar:
    literals = Literals(vocabulary, form.literals)  # type: ignore[arg-type]
    return Grammar(tool_guide(form, tools, literals, *settings, **more), vocabulary)


def written(form: ChatFormat, *calls: Call) -> str:
    assert form.calls
    return write_calls(form.calls, calls if form.calls.max_calls is None else calls[:1])


def read(form: ChatFormat, text: str) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls and the content of an answer."""
    reader = AnswerReader(form, Tools(SCHEMAS))
    calls, content = list[tuple[str, str]](), ""
    for part in reader.read(text) + reader.end():
        if isinstance(part, CallStart):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
        elif isinstance(part, Content):
            content += part.text
    return [(name, json.loads(arguments)) for name, arguments in calls], content


@each("name", FORMS, quick=QUICK)
def test_required_calls_match_and_are_read_back(name: str) -> None:
    """The grammar takes what the model writes, and the reader takes random texts of the grammar: valid calls only.

    llama.cpp#26737: tags that are required have a valid grammar in their own form.
    """
    validators = pytest.importorskip("jsonschema_rs", reason="needs the extra test-clients")
    valid = {tool: validators.validator_for(schema) for tool, schema in SCHEMAS.items()}
    form = FORMS[name]
    assert form.calls
    calls = [Call("find", ARGUMENTS, ID), Call("any.thing", {"q": "z"}, ID), Call("now", {}, ID)]
    closers = [
        form.calls.tag.value_close,
        form.calls.quote,
        form.reasoning.close if form.reasoning else "",
        "<|end|>",
        '"',
    ]
    draw, num_read = random.Random(5), 0
    for vocabulary in (Vocabulary.of_format(form), Vocabulary.of_format(form, has_special=False)):
        grammar_of_calls = grammar(form, vocabulary, True, True)
        assert grammar_of_calls.matches(written(form, *calls))
        for wrong in ({"days": 3}, {"city": "a", "unit": "k"}, {"city": "a", "town": "b"}, {"city": "a", "days": "b"}):
            assert not grammar_of_calls.matches(written(form, Call("find", wrong, ID)))
        assert not grammar_of_calls.matches(written(form, Call("lost", {}, ID)))
        for _ in range(12):
            if (text := grammar_of_calls.random_text(draw, closers)) is None:
                continue
            read_calls, content = read(form, text)
            assert read_calls, text
            assert not content, text
            assert all(valid[tool].is_valid(arguments) for tool, arguments in read_calls), (text, read_calls)
            num_read += 1
    assert num_read >= 12


def texts_of(form: ChatFormat) -> tuple[str, str, str]:
    """Return what a model writes for a thought, for text before calls and for the text `SAID`."""
    assert form.calls
    if form.calls.tag.key_open and form.calls.body is Body.harmony:
        thought, text = " to=self<|message|>hm<|eom|><|start|>assistant", f" to=user<|message|>{SAID}"
        return thought, text.replace(SAID, "So:") + "<|eom|><|start|>assistant", text
    if form.calls.body is Body.harmony:
        thought, before = (
            f"<|channel|>{channel}<|message|>hm<|end|><|start|>assistant" for channel in ("analysis", "commentary")
        )
        return thought, before, f"<|channel|>final<|message|>{SAID}"
    thought = f"{form.reasoning.open}hm {form.reasoning.close}\n\n" if form.reasoning else ""
    answer = form.answer or ("", "")
    return thought, "Well: " if form.calls.opening.strip() else "", f"{answer[0]}{SAID}{answer[1]}"


@each("name", FORMS, quick=QUICK)
def test_free_answers(name: str) -> None:
    """Text, calls behind text, reasoning before both. Strict tools keep their schema. A guide binds the text only."""
    form = FORMS[name]
    assert form.calls
    thought, before, text = texts_of(form)
    fine = text.replace(SAID, "Fine < [ fine.")
    call, wrong = written(form, Call("find", {"city": "a<b>"}, ID)), written(form, Call("find", {"town": "a<b>"}, ID))
    free = written(form, Call("any.thing", {"town": "a"}, ID))
    tools = tools_of(SCHEMAS, strict=("find",))
    for vocabulary in (Vocabulary.of_format(form), Vocabulary.of_format(form, has_special=False)):
        auto = grammar(form, vocabulary, False, True, tools=tools)
        right = [fine, before + call, before + free, thought + fine, thought + call, thought + before + call]
        assert [answer for answer in right if not auto.matches(answer)] == []
        assert not any(auto.matches(answer) for answer in (before + wrong, thought + wrong))
        required = grammar(form, vocabulary, True, True)
        assert [required.matches(answer) for answer in (thought + call, fine, wrong, thought + wrong)] == [
            True,
            False,
            False,
            False,
        ]
        single, two = grammar(form, vocabulary, False, False, tools=tools), written(form, *[Call("now", {}, ID)] * 2)
        assert single.matches(before + call)
        assert single.matches(before + two) is (form.calls.max_calls == 1)
        literals = Literals(vocabulary, form.literals)  # type: ignore[arg-type]
        for guide, good, bad in (
            ({"json_schema": {"type": "object", "properties": {"z": {"type": "integer"}}}}, '{"z": 1}', '{"z": "a"}'),
            ({"json_object": True}, '{"q": [1]}', "1"),
            ({"regex": "[0-9]+/x"}, "12/x", "b"),
            ({"choice": ["yes", 'n"o']}, 'n"o', "maybe"),
        ):
            both = grammar(form, vocabulary, False, True, guide=guide)
            alone = Grammar(after_reasoning(guide, form, literals), vocabulary)
            for start in ("", thought):
                assert both.matches(start + call), start
                answers = [start + text.replace(SAID, value) for value in (good, bad)]
                assert [both.matches(answer) for answer in answers] == [True, False], (
                    vocabulary.special_texts,
                    answers,
                )
                assert [alone.matches(answer) for answer in answers] == [True, False], answers


def test_reasoning_that_the_prompt_begins_or_has_ended() -> None:
    for name in ("hermes", "kimi", "gemma4", "mistral_v13", "deepseek_v31", "qwen3_coder", "gpt_oss"):
        form, vocabulary = FORMS[name], Vocabulary.of_format(FORMS[name])
        assert form.reasoning
        thought, call = texts_of(form)[0], written(form, Call("find", {"city": "a"}))
        rest = thought.removeprefix(form.reasoning.open)
        for is_required in (True, False):
            tools = tools_of(SCHEMAS, strict=("find",))
            begun = grammar(form, vocabulary, is_required, True, begun=form.reasoning.open, tools=tools)
            assert begun.matches(rest + call)
            assert begun.matches(f"see {call.splitlines()[0]}") is False
            if name != "gpt_oss":  # its reasoning is a message, which only its end leaves
                wrong = written(form, Call("find", {"city": "a", "unit": "k"}))
                for line in ("", "hm\n"):  # the reader takes calls at a line's beginning
                    assert begun.matches(line + call)
                    assert not begun.matches(line + wrong)
                ended = grammar(form, vocabulary, is_required, True, begun=thought)
                assert ended.matches(call)
                assert not (is_required and ended.matches(thought + call))
    form = FORMS["hermes"]
    call = written(form, Call("find", {"city": "a"}))
    # A model without a token for the opening shares the format of another one that reasons: it calls at once.
    for vocabulary, may_reason in ((Vocabulary([]), False), (Vocabulary([], ["<think>"]), True)):
        required = grammar(form, vocabulary, True, True)
        assert required.matches(call)
        assert required.matches(f"<think>hm</think>{call}") is may_reason
        assert grammar(form, vocabulary, False, True, tools=tools_of(SCHEMAS, ("find",))).matches(f"<think>{call}")


def test_ids_that_calls_write() -> None:
    kimi, cohere, mistral = FORMS["kimi"], FORMS["cohere"], FORMS["mistral_v11"]
    two = [Call("now", {}), Call("any.thing", {"a": 1})]
    text = written(kimi, *two)
    for first in (0, 3):
        counted = grammar(kimi, Vocabulary.of_format(kimi), True, True, next_id=first)
        expected = text.replace("now:0", f"now:{first}").replace("thing:1", f"thing:{first + 1}")
        assert counted.matches(expected)
        assert counted.matches(text) is (first == 0)
        assert not counted.matches(expected.replace(f":{first + 1}", f":{first + 1}0"))
    assert counted.matches(written(kimi, *two * 4).replace(":", ":x").replace(":x0", ":3")) is False
    many = grammar(kimi, Vocabulary.of_format(kimi), True, True)
    assert [many.matches(written(kimi, *[Call("now", {})] * n)) for n in (8, 9)] == [True, False]
    answer = grammar(cohere, Vocabulary.of_format(cohere), True, True, next_id=5)
    assert answer.matches(written(cohere, *two))  # counts within an answer
    assert not answer.matches(written(cohere, *two).replace('"0"', '"5"'))
    ids = grammar(mistral, Vocabulary.of_format(mistral), True, True)
    for id, is_right in ((ID, True), ("a1B2c3D4e", True), ("a", False), (ID * 2, False), ("abc-efghi", False)):
        assert ids.matches(written(mistral, Call("now", {}, id))) is is_right


LEAF = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"], "additionalProperties": False}
OPTION = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 5}, "b": {"type": "string", "maxLength": 3}},
}
FOLLOWED: list[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    # a schema, arguments that it allows, and arguments that it does not allow
    (
        {**LEAF, "properties": {**LEAF["properties"], "c": {"type": "array", "items": {"$ref": "#"}}}},  # type: ignore[dict-item]
        [{"v": 1, "c": [{"v": 2, "c": [{"v": 3}]}]}],
        [{"v": 1, "c": [{"v": "2"}]}, {"c": []}],
    ),
    (
        {"properties": {"c": {"$ref": "#there"}}, "$defs": {"x": LEAF | {"$anchor": "there"}}},
        [{"c": {"v": 1}}, {}],
        [{"c": {"w": 1}}],
    ),
    ({**OPTION, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 5}, {"b": "abc"}], [{}, {"a": 6}]),
    ({"oneOf": [LEAF, {"properties": {"w": LEAF}, "required": ["w"]}]}, [{"v": 1}, {"w": {"v": 1}}], [{}]),
    ({"anyOf": [{"type": "string"}, LEAF]}, [{"v": 1}], [{}]),
    (
        {
            "type": ["object", "null"],
            "allOf": [{**LEAF, "additionalProperties": True}, {"properties": {"w": {"const": None}}}],
        },
        [{"v": 1, "w": None}],
        [{"v": 1, "w": 1}],
    ),
    ({"allOf": [LEAF, {"properties": {"w": {"const": None}}}]}, [{"v": 1}], [{"v": 1, "w": None}]),
    ({"additionalProperties": {"type": "integer"}}, [{}, {"k": 1, "l": 2}], [{"k": True}]),
    (
        {"properties": {"a": {"type": "boolean"}}, "additionalProperties": {"type": "number"}},
        [{"a": True, "k": 1.5}],
        [{"a": 2}],
    ),
    (
        {"properties": {"a": {"enum": ["x", None, 2, True]}}, "required": ["a"]},
        [{"a": "x"}, {"a": None}, {"a": 2}],
        [{"a": "y"}],
    ),
    (
        {"properties": {"a": {"type": "array", "items": LEAF, "minItems": 1, "maxItems": 2}}},
        [{"a": [{"v": 1}]}],
        [{"a": []}],
    ),
    ({"properties": {"d": {"type": "string", "format": "date"}}}, [{"d": "2026-11-28"}], [{"d": "2026-13-28"}]),
    ({}, [{}], []),
]


@each("name", ["hermes", "qwen3_coder", "deepseek_v4", "gemma4", "lfm2", "apertus", "llama3"])
def test_parameters_keep_their_schema(name: str) -> None:
    form, vocabulary = FORMS[name], Vocabulary.of_format(FORMS[name])
    for schema, right, wrong in FOLLOWED:
        rules = grammar(form, vocabulary, True, True, tools=tools_of({"f": schema}))
        for arguments, is_right in [*((one, True) for one in right), *((one, False) for one in wrong)]:
            assert rules.matches(written(form, Call("f", arguments))) is is_right, (schema, arguments)
    for pattern in ("a/b", r"\d+\w", "a\nb", r"[/]\/", r"\\/", "(?i)a", '"x"', "\\\\/\n"):
        assert regex(pattern) == regex_to_lark(pattern, use_ascii="")
    named = tools_of({"f": {"properties": {"from": {"type": "string"}, "to": {"type": "string"}}}})
    if name == "qwen3_coder":  # a value holds no closing tag, also without its line break: the reader ends it there
        other = written(form, Call("f", {"from": "a</parameter>\n<parameter=more>\nb"}))
        assert not rules.matches(other)
    reserved = name == "lfm2"  # Python has no keyword argument with this name, so it is left out
    rules = grammar(form, vocabulary, True, True, tools=named)
    assert rules.matches(written(form, Call("f", {"to": "a"})))
    assert rules.matches(written(form, Call("f", {"from": "a"}))) is not reserved


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1) if depth else {"type": "string"}}}


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": nested(30),
    "many": {"properties": {f"p{i}": {"type": "string"} for i in range(500)}},
    "many required": {"properties": {f"p{i}": {} for i in range(500)}, "required": [f"p{i}" for i in range(500)]},
    "itself": {"$ref": "#"},
    "circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "products": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(12)]},
    "missing": {"properties": {"a": {"$ref": "#/$defs/none"}}},
    "remote": {"properties": {"a": {"$ref": "http://localhost/a"}}},
    "no schema": {"properties": {"a": {"anyOf": [3, "x"]}}},
    "no list": {"required": 3, "properties": {"a": {"type": [3]}}},
    "no mapping": {"properties": 3},
    "long": {"properties": {"a": {"type": "string", "maxLength": 10**12}}},
    "endless": {"properties": {"a": {"type": "array", "maxItems": 10**9, "minItems": 10**8}}},
    "pattern": {"properties": {"a": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}}},
    "unclosed": {"properties": {"a": {"type": "string", "pattern": "^([" + "\\a" * 40 + "|"}}},
    "slash": {"properties": {"a": {"type": "string", "pattern": "\\/\n start: /x/"}}},
    "options": {"properties": {"a": {"type": "string", "x-guidance": {"lenient": True}}}},
    "network": {
        "$defs": {
            f"d{i}": {"properties": {f"q{j}": {"$ref": f"#/$defs/d{(i + j) % 60}"} for j in range(9)}}
            for i in range(60)
        },
        "properties": {f"p{i}": {"$ref": f"#/$defs/d{i % 60}"} for i in range(100)},
    },
}


@each("name", ["hermes", "qwen3_coder", "gemma4", "lfm2"])
def test_hostile_schemas_are_refused_or_small(name: str) -> None:
    """Every grammar is within the limits of guides, or the error names the field; nothing else is raised."""
    form, vocabulary = FORMS[name], Vocabulary.of_format(FORMS[name])
    refused = []
    for case, schema in HOSTILE.items():
        try:
            grammar(form, vocabulary, True, True, tools=tools_of({"f": schema}))
        except ApiError as error:
            refused.append((error.status, error.param))
        except (UserError, AssertionError) as error:  # of check_guide, and of the engine's compiler
            refused.append((400, "tools" if str(error) else case))
    assert {*refused} <= {(400, "tools"), (400, "tools[0].function.parameters")}
    assert len(refused) >= 8
    for wrong in ({"type": "string"}, {"type": ["array"]}):
        with pytest.raises(ApiError, match="the arguments of a call are an object") as raised:
            grammar(form, vocabulary, True, True, tools=tools_of({"f": wrong}))
        assert raised.value.param == "tools[0].function.parameters.type"
