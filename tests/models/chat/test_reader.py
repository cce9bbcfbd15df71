"""Answers of models: content, reasoning and tool calls, independent of the split into pieces."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import UserError
from models.chat.calls import Tools
from models.chat.description import Body, read_description
from models.chat.entries import entries, matching_entries, read_format_file
from models.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from models.chat.reader import AnswerReader
from models.chat.special_tokens import Vocabulary
from models.chat.stream import SPACE, Reading, TextStream
from models.chat.writer import Call, write_calls
from tests.helpers.cases import each

CITY = {"type": "string"}
WEATHER = {
    "properties": {"city": CITY, "n": {"type": "integer"}, "o": {"type": "object"}, "u": {"type": ["null", "string"]}}
}
TOOLS = Tools({"weather": WEATHER, "clock": None, "exec": {}})
ARGUMENTS = {"city": '北京 "x"', "n": 3, "o": {"a": [1, 2.5, None, True]}, "u": None}
JSON = json.dumps(ARGUMENTS)
CALL = ("weather", ARGUMENTS, None)
CLOCK = ("clock", {}, None)
H = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'


def hermes(name: str, arguments: str) -> str:
    return H.replace("NAME", name).replace("ARGUMENTS", arguments)


def x(name: str, *arguments: tuple[str, str]) -> str:
    """Return a call in the form of Qwen3-Coder."""
    texts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments]
    return f"<tool_call>\n<function={name}>\n{''.join(texts)}</function>\n</tool_call>"


LFM2 = "<|tool_call_start|>{}<|tool_call_end|>"


def parts_of(
    form: str, pieces: Iterable[str], tools: Tools | None = TOOLS, begun: str = "", is_cut: bool = False
) -> list[Part]:
    """Return the parts of an answer that arrives in pieces. Adjacent parts of a kind are joined."""
    reader = AnswerReader(entries()[form].form, tools, begun)
    parts: list[Part] = []
    for part in [part for piece in pieces for part in reader.read(piece)] + reader.end(is_cut):
        last = parts[-1] if parts else None
        if type(part) is type(last) and not isinstance(part, CallStart):
            parts[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            parts.append(part)
    return parts


def message(parts: list[Part]) -> list[Any]:
    """Return the parts, each call as its name, its arguments as an object, and its id."""
    values: list[Any] = []
    for part in parts:
        if isinstance(part, CallStart):
            values.append((part.name, "", part.id))
        elif isinstance(part, CallArguments):
            name, text, id = values[-1]
            values[-1] = (name, text + part.text, id)
        else:
            values.append(part)
    return [
        value if isinstance(value, Content | Reasoning) else (value[0], _object(value[1]), value[2]) for value in values
    ]


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def answer(form: str, text: str, **options: Any) -> list[Any]:
    """Return the message of an answer. It is the same letter by letter, and cut in two at every place."""
    parts = parts_of(form, [text], **options)
    for pieces in (list(text), *([text[:i], text[i:]] for i in range(0, len(text), 1 + len(text) // 300))):
        assert parts_of(form, pieces, **options) == parts, pieces
    return message(parts)


def test_calls_of_every_format_are_read_as_they_are_written() -> None:
    for name, entry in entries().items():
        if (form := entry.form.calls) is None:
            continue
        arguments = {key: ARGUMENTS[key] for key in ("city", "n", "o")}
        calls = [Call("weather", arguments, "abcdefgh1"), Call("clock", {}, "abcdefgh2")][: form.max_calls]
        ids = [form.id_form.format(name=call.name, index=i) for i, call in enumerate(calls)]
        ids = ids if "{name}" in form.id_form else [call.id if form.id_open else None for call in calls]
        expected = [(call.name, call.arguments, id) for call, id in zip(calls, ids, strict=True)]
        assert answer(name, write_calls(form, calls)) == expected, name
        if form.opening.strip() and form.body is not Body.harmony:
            assert answer(name, f"Look:\n{write_calls(form, calls)}") == [Content("Look:"), *expected], name
        assert not any(isinstance(part, CallStart) for part in parts_of(name, [write_calls(form, calls)], None))


CASES: list[tuple[str, str, list[Any]]] = [
    ("hermes", "Just text. \n", [Content("Just text. \n")]),
    ("hermes", "<think>\nhm\n</think>\n\nFine.\n", [Reasoning("hm"), Content("Fine.\n")]),
    ("hermes", "<think>\n\n</think>\n\nFine.", [Content("Fine.")]),
    ("hermes", "<think>cut by len", [Reasoning("cut by len")]),
    ("hermes", f"Look:\n{hermes('weather', JSON)}\nDone.", [Content("Look:"), CALL, Content("Done.")]),
    ("hermes", '<tool_call>\n{"name": "clock", "arguments": {}}', [CLOCK]),  # ended without the closing literal
    ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "exec"}</tool_call>', [("exec", {"n": 1}, None)]),
    ("hermes", hermes("exec", '"{\\"a\\": \\"b\\"}"'), [("exec", {"a": "b"}, None)]),
    ("hermes", hermes("exec", '{"a": "two\nlines"}'), [("exec", {"a": "two\nlines"}, None)]),
    ("hermes", hermes("clock", "null"), [CLOCK]),
    (
        "hermes",
        f'<tool_call>[{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock"}}]</tool_call>',
        [CALL, CLOCK],
    ),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "clock", "arguments": {}}}</tool_call>', [CLOCK]),
    ("hermes", hermes("unknown", "{}"), [Content(hermes("unknown", "{}"))]),
    ("llama3", f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}', [CALL]),
    ("llama3", f' {{"name": "weather", "parameters": {JSON}}}; {{"name": "clock", "parameters": {{}}}}', [CALL, CLOCK]),
    ("llama3", '[exec(a=1), exec(b="x]")]', [("exec", {"a": 1}, None), ("exec", {"b": "x]"}, None)]),
    ("llama3", 'So:\n{"name": "clock", "parameters": {}}\nBye', [Content("So:"), CLOCK, Content("Bye")]),
    ("llama3", '{"name": "unknown", "parameters": {}}', [Content('{"name": "unknown", "parameters": {}}')]),
    ("llama3", '{"any": "json"} ', [Content('{"any": "json"} ')]),
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}, "id": "abcdefgh1"}}]', [CALL]),
    ("mistral_v13", "[THINK]hm[/THINK]Fine", [Reasoning("hm"), Content("Fine")]),
    ("mistral_v13", "[TOOL_CALLS]clock[ARGS]", [CLOCK]),
    ("deepseek", "<think>hm</think>Ok", [Reasoning("hm"), Content("Ok")]),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        [Content("<|tool_calls_section_begin|><|tool_calls_section_end|>")],
    ),
    (
        "cohere",
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Fine<|END_RESPONSE|>",
        [Reasoning("hm"), Content("Fine")],
    ),
    ("functionary_v32", ">>>all\nFine>>>clock\n{}", [Content("Fine"), CLOCK]),
    ("chatglm3", "\n 你好\n", [Content("你好\n")]),
    ("chatglm3", "weather is fine", [Content("weather is fine")]),
    ("glm4", "\nFine.", [Content("Fine.")]),
    ("glm4", "cloc", [Content("cloc")]),
    ("gpt_oss", "Plain", [Content("Plain")]),
    ("gpt_oss", "<|channel|>final<|message|>Fine<|return|>", [Content("Fine")]),
    ("gpt_oss", " to=functions.clock<|channel|>commentary json<|message|>{}<|call|>", [CLOCK]),
    ("gpt_oss", "<|channel|>commentary to=functions.no <|message|>{}<|call|>", [Content("{}")]),
    ("qwen3_coder", x("exec", ("a", "1e999"), ("b", "[1, 2]")), [("exec", {"a": float("inf"), "b": [1, 2]}, None)]),
    ("lfm2", LFM2.format(f'[{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock"}}]'), [CALL, CLOCK]),
    ("lfm2", LFM2.format("[clock()]") * 2 + "Wait.", [CLOCK, CLOCK, Content("Wait.")]),
    (
        "lfm2",
        LFM2.format("[exec(a=True, b={'c': null}, d='x'\n 'y',)]"),
        [("exec", {"a": True, "b": {"c": None}, "d": "xy"}, None)],
    ),
    (
        "lfm2",
        LFM2.format("[exec(a='it's, \"ok\"', b=['don't'])]"),
        [("exec", {"a": 'it\'s, "ok"', "b": ["don't"]}, None)],
    ),
    (
        "nemotron2",
        f'<TOOLCALL>[{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock", "arguments": {{}}}}]</TOOLCALL>',
        [CALL, CLOCK],
    ),
    ("text", "<think>a</think>b <tool_call>", [Reasoning("a"), Content("b <tool_call>")]),
    (
        "minimax_m3",
        '<mm:think>hm</mm:think>Ok]~[<tool_call>\n]~[<invoke name="exec">\n]~[<a>]~[<item>1]~[</item>]~[</a>]~[<b>]~[<c>x<y'
        ']~[</c>]~[<c>2]~[</c>]~[</b>]~[</invoke>\n]~[<invoke name="weather">]~[<city>12]~[</city>]~[</invoke>'
        "\n]~[</tool_call>".replace("]~[", "]<]minimax[>["),
        [
            Reasoning("hm"),
            Content("Ok"),
            ("exec", {"a": [1], "b": {"c": ["x<y", 2]}}, None),
            ("weather", {"city": "12"}, None),
        ],
    ),
    ("none", "<think>a</think>", [Content("<think>a</think>")]),
]


@each("form, text, expected", CASES)
def test_parts_of_an_answer(form: str, text: str, expected: list[Any]) -> None:
    assert answer(form, text) == expected


KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>"
M2 = '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="u">{}</parameter>\n</invoke>\n</minimax:tool_call>'
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="exec">\n<｜DSML｜parameter name="a" string="true">b</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
HARMONY = "<|channel|>analysis<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Fine"
PARIS = ("weather", {"city": "Paris"}, None)

REPORTS: dict[str, tuple[str, str, list[Any], dict[str, Any]]] = {
    # what the report shows: format, answer, expected message, options
    "vllm#20678 deltas of any size sum to the whole arguments": ("hermes", hermes("weather", JSON), [CALL], {}),
    "vllm#32152 the last bracket is kept": ("hermes", hermes("exec", '{"a": {}}'), [("exec", {"a": {}}, None)], {}),
    "vllm#45167 a closer in a string closes nothing": (
        "hermes", hermes("exec", '{"a": "</tool_call>"}'), [("exec", {"a": "</tool_call>"}, None)], {},
    ),
    "vllm!53638 a stray opener twice gives one call": ("hermes", f"<tool_call>\n{hermes('clock', '{}')}", [CLOCK], {}),
    "llama.cpp#18183 plain JSON of a Hermes model is content": ("hermes", '{"a": 1}', [Content('{"a": 1}')], {}),
    "vllm#39056 a call in unclosed reasoning": (
        "hermes", f"<think>hm\n{hermes('clock', '{}')}", [Reasoning("hm"), CLOCK], {},
    ),
    "vllm#42021 reasoning and a tagged call": (
        "qwen3_coder", f"hm\n</think>\n\n{x('weather', ('city', 'Paris'))}", [Reasoning("hm"), PARIS], {"begun": "<think>\n"},
    ),
    "vllm#51679 the closer splits reasoning and calls": (
        "hermes", f"<think>hm</think>{hermes('clock', '{}')}", [Reasoning("hm"), CLOCK], {},
    ),
    "vllm#22507 the prompt began the reasoning": (
        "deepseek", "a</think>b", [Reasoning("a"), Content("b")], {"begun": "<think>"},
    ),
    "vllm#19222 JSON with reasoning off": ("hermes", '{"a": 1} ', [Content('{"a": 1} ')], {}),
    "dynamo#8636 two calls with reasoning off": ("hermes", f"{hermes('clock', '{}')}\n{hermes('clock', '{}')}", [CLOCK] * 2, {}),
    "vllm#44060 a closing tag within a value": (
        "qwen3_coder", x("weather", ("city", "a</parameter> b")), [("weather", {"city": "a</parameter> b"}, None)], {},
    ),
    "llama.cpp#24807 a doubled closing tag": (
        "qwen3_coder", x("weather", ("city", "Paris\n</parameter>")), [PARIS], {},
    ),
    "llama.cpp#24644 parameters in another order": (
        "qwen3_coder", x("weather", ("n", "3"), ("city", "Paris")), [("weather", {"n": 3, "city": "Paris"}, None)], {},
    ),
    "llama.cpp#22878 two calls without white space": ("qwen3_coder", x("clock") + x("clock"), [CLOCK] * 2, {}),
    "vllm#44326 a call without arguments": ("glm47", "<tool_call>clock</tool_call>", [CLOCK], {}),
    "ds4#569 an integer is no string": (
        "glm47", "<tool_call>weather<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>", [("weather", {"n": 3}, None)], {},
    ),
    "vllm#53227 a closer cut by deltas is not in the value": ("deepseek_v4", DSML, [("exec", {"a": "b"}, None)], {}),
    "sglang#16057 null of a string or null": ("minimax_m2", M2.format("null"), [("weather", {"u": None}, None)], {}),
    "sglang!39240 a string without its opening quote": (
        "gemma4", '<|tool_call>call:weather{city:Paris<|"|>}<tool_call|>', [PARIS], {},
    ),
    "vllm#44522 a quote at the end of a delta": (
        "gemma4", '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>', [PARIS], {},
    ),
    "llama.cpp!17376 the singular section": (
        "kimi", KIMI.format("functions.clock:0").replace("calls_section", "call_section"), [("clock", {}, "functions.clock:0")], {},
    ),
    "sglang!21377 an id without its separators": ("kimi", KIMI.format("functionsexec5"), [("exec", {}, None)], {}),
    "harmony#38 a doubled header": ("gpt_oss", HARMONY, [Reasoning("hm"), Content("Fine")], {}),
    "vllm!45609 a second opening of the reasoning": (
        "mistral_v13", "[THINK]a[/THINK]b[THINK]c[/THINK]d", [Reasoning("a"), Content("b"), Reasoning("c"), Content("d")], {},
    ),
    "vllm!48171 Python with brackets in a string": (
        "lfm2", '<|tool_call_start|>[exec(a="x]",b=-1)]<|tool_call_end|>', [("exec", {"a": "x]", "b": -1}, None)], {},
    ),
    "vllm!48171 Python with a tuple, and with a name that is a word of Python": (
        "lfm2", LFM2.format("[exec(size=(8, 6), from=1)]"), [("exec", {"size": [8, 6], "from": 1}, None)], {},
    ),
    "vllm!26233 of two calls only one is wanted": (
        "hermes", f"{hermes('clock', '{}')}\n{hermes('exec', '{}')}", [CLOCK], {"tools": Tools(TOOLS.parameters, 1)},
    ),
}  # fmt: skip


@each("report", REPORTS)
def test_answers_of_bug_reports(report: str) -> None:
    form, text, expected, options = REPORTS[report]
    assert answer(form, text, **options) == expected


def test_messages_with_headers_are_read_without_tools() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Fine<|return|>"
    assert answer("gpt_oss", text, tools=None) == [Reasoning("hm"), Content("Fine")]


F = '<tool_call>\n{"name": "exec", "arguments": {"a": "1"}'
EXEC = ("exec", {"a": "1"}, None)
FAULTY: list[tuple[str, str, list[Any]]] = [  # calls that a model writes with a fault
    (
        "hermes",
        f"{hermes('exec', JSON)}\n{hermes('unknown', '{}')}",
        [("exec", ARGUMENTS, None), Content(hermes("unknown", "{}"))],
    ),
    ("hermes", F + "\n</tool_call>\nDone.", [EXEC, Content("Done.")]),
    ("hermes", F + ', "reason": "x"}\n</tool_call>\nDone.', [EXEC, Content("Done.")]),
    ("hermes", F + "}}\n</tool_call>\nDone.", [EXEC, Content("Done.")]),
    ("hermes", F[:-1] + "\n</tool_call>\nDone.", [EXEC, Content("Done.")]),
    ("kimi", KIMI.format("functions.clock:0").replace("{}", ""), [("clock", {}, "functions.clock:0")]),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [CLOCK],
    ),
    (
        "qwen3_coder",
        x("exec", ("a", "x")).replace("</function>\n", "") + "\nDone.",
        [("exec", {"a": "x"}, None), Content("Done.")],
    ),
    ("gpt_oss", "<|channel|>commentary to=functions.clock <|message|><|call|>", [CLOCK]),
    ("gpt_oss", "<|channel|>commentary to=functions.clock <|message|>]<|call|>", [("clock", "", None)]),
    (
        "gpt_oss",
        "<|channel|>analysis to=python code<|message|>1+1<|end|><|start|>assistant<|channel|>final<|message|>2",
        [Reasoning("1+1"), Content("2")],
    ),
    (
        "qwen3_coder",
        x("exec", ("k" * 400, "v")),
        [("exec", "", None), Content("k" * 100 + ">\nv\n</parameter>\n</function>\n</tool_call>")],
    ),
]


@each("form, text, expected", FAULTY)
def test_calls_with_a_fault(form: str, text: str, expected: list[Any]) -> None:
    assert answer(form, text) == expected
    reader = AnswerReader(entries()[form].form, TOOLS)
    reader.read(text)
    reader.end()
    assert reader.has_cut_call is ("" in [part[1] for part in expected if isinstance(part, tuple)])


def test_markers_count_as_tokens_and_else_at_a_line() -> None:
    """Text about a marker is text. A special token counts anywhere, also within reasoning."""

    def parts(form: str, pieces: list[tuple[str, int]], markers: dict[int, str]) -> list[Any]:
        reader = AnswerReader(entries()[form].form, TOOLS, vocabulary=Vocabulary(markers, lambda id: sizes[id]))
        sizes = {id: len(text.encode()) for text, id in pieces}
        return message([part for text, id in pieces for part in reader.read(text, [id])] + reader.end())

    assert parts("hermes", [("The `<think>` tag and <think>", 1)], {}) == [Content("The `<think>` tag and <think>")]
    assert parts("hermes", [("<think>hm</think>Fine", 1)], {}) == [Reasoning("hm"), Content("Fine")]
    call = [("[THINK]", 1), ("hm", 2), ("[TOOL_CALLS]", 3), ("clock", 4), ("[ARGS]", 5), ("{}", 6)]
    assert parts("mistral_v13", call, {1: "[THINK]", 3: "[TOOL_CALLS]", 5: "[ARGS]"}) == [Reasoning("hm"), CLOCK]
    assert parts("glm47", [("<tool_call>cloc", 1)], {}) == [Content("<tool_call>cloc")]
    assert answer("glm47", "<tool_call>clock", is_cut=True) == [Content("<tool_call>clock")]  # or clock_of


def test_arguments_arrive_before_their_call_is_complete() -> None:
    """vllm#30439: a long string arrives in pieces, in every body that can stream it."""
    for form, opening in (
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "'),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\n"),
        ("glm47", "<tool_call>weather<arg_key>city</arg_key><arg_value>"),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>'),
        ("mistral_v13", '[TOOL_CALLS]weather[ARGS]{"city": "'),
    ):
        reader = AnswerReader(entries()[form].form, TOOLS)
        assert CallStart("weather") in reader.read(opening)
        assert reader.read("Par") == [CallArguments("Par")]
        assert reader.read("is") == [CallArguments("is")]


def test_an_answer_that_is_cut_leaves_its_arguments_cut() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par'
    for form, cut, arguments in (
        ("hermes", text, '{"city": "Par'),
        ("hermes", text[: text.index('"Par')], '{"city": '),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nPar", '{"city": "Par'),
    ):
        assert answer(form, cut, is_cut=True) == [("weather", arguments, None)]
        reader = AnswerReader(entries()[form].form, TOOLS)
        reader.read(cut)
        reader.end(is_cut=True)
        assert reader.has_cut_call
    ended = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"'
    assert answer("hermes", ended) == [PARIS]  # the model ended: only brackets are missing
    assert answer("hermes", hermes("clock", "{}")[:-3], is_cut=True) == [CLOCK]  # within the closing literal
    for nothing_out in ('<tool_call>\n{"name": "weath', "<tool_call>\n<function=wea"):
        assert answer("hermes", nothing_out, is_cut=True) == [Content(nothing_out)]


@each(
    "code",
    ["__import__('os').system('x')", "tool_call(a=open('x'))", "tool_call(1)", "tool_call(**{'a': 1})", "tool_call(a={1})",
     "tool_call(a=1e999)", "tool_call(", "(" * 5000],
)  # fmt: skip
def test_python_of_an_answer_is_never_run(code: str) -> None:
    text = f"clock\n```python\n{code}\n```"
    assert message(parts_of("chatglm3", [text])) == [Content(text)]
    assert message(parts_of("lfm2", [f"<|tool_call_start|>[{code.replace('tool_call', 'clock')}]"])) == [
        Content(f"<|tool_call_start|>[{code.replace('tool_call', 'clock')}]")
    ]


def test_special_tokens_that_are_not_part_of_an_answer_are_dropped() -> None:
    form = entries()["mistral"].form
    for text in ("Fine</s>", "</s>Fi</s>ne"):
        for pieces in ([text], list(text)):
            reader = AnswerReader(form, TOOLS, dropped=["</s>"])
            parts = [part for piece in pieces for part in reader.read(piece)] + reader.end()
            assert "".join(part.text for part in parts if isinstance(part, Content)) == "Fine"
    reader = AnswerReader(form, TOOLS, dropped=["</s>"])
    assert [*reader.read("a</</s>s></"), *reader.end()] == [Content("a</s>"), Content("</")]


def test_text_is_not_held_back_longer_than_it_may_be_a_literal() -> None:
    reader = AnswerReader(entries()["hermes"].form, TOOLS)
    assert [reader.read(piece) for piece in ("a<", "b", "<tool", "s>", " c")] == [
        [Content("a")],
        [Content("<b")],
        [],
        [Content("<tools>")],
        [Content(" c")],
    ]
    assert AnswerReader(entries()["llama3"].form, TOOLS).read("No") == [Content("No")]


WORDS = [
    "<",
    "think>",
    "</think>",
    "clock",
    "weather",
    "\n",
    " ",
    "{}",
    JSON,
    '"',
    "}",
    "]",
    "x",
    ", ",
    "3",
    "null",
    ">>>",
]


def check_cutting(name: str, reasons: bool, is_cut: bool, data: Any) -> None:
    """Compare an answer of literals and values in random pieces with the answer in one piece."""
    form = entries()[name].form
    calls = form.calls and write_calls(form.calls, [Call("weather", {"city": "</a>\n"}), Call("clock", {})])
    words = [*WORDS, *form.literals, *([calls, calls[: len(calls) // 2]] if calls else [])]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    shards = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[begin:end] for begin, end in zip([0, *shards], [*shards, len(text)], strict=True)]
    options = {"begun": form.reasoning.open if reasons and form.reasoning else "", "is_cut": is_cut}
    expected = parts_of(name, [text], **options)
    assert parts_of(name, pieces, **options) == expected
    assert parts_of(name, list(text), **options) == expected


@settings(max_examples=200)
@given(st.sampled_from(sorted(entries())), st.booleans(), st.booleans(), st.data())
def test_no_cutting_changes_the_parts(name: str, reasons: bool, is_cut: bool, data: Any) -> None:
    check_cutting(name, reasons, is_cut, data)


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(entries()))
@settings(max_examples=10_000)
@given(st.booleans(), st.booleans(), st.data())
def test_no_cutting_changes_the_parts_of_a_format(name: str, reasons: bool, is_cut: bool, data: Any) -> None:
    check_cutting(name, reasons, is_cut, data)


@given(st.sampled_from(sorted(entries())), st.text("a <{\n[t"))
def test_text_without_calls_is_content_to_the_letter(name: str, text: str) -> None:
    form = entries()[name].form
    expected = text.lstrip(" \n") if form.answer and form.answer.open.isspace() else text
    assert parts_of(name, [text]) == ([Content(expected)] if expected else [])


def test_a_model_that_repeats_itself_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An opening that begins no call is read again as text, which would be quadratic: it ends at a number of characters."""
    num_skips = 0
    skip = TextStream.skip

    def counted(self: TextStream, characters: str = SPACE) -> Reading[None]:
        nonlocal num_skips
        num_skips += 1
        return skip(self, characters)

    monkeypatch.setattr(TextStream, "skip", counted)
    monkeypatch.setattr("models.chat.calls.MAX_READ_AGAIN", 1000)
    for form, word in (
        ("cohere", "<|START_ACTION|>[f("),
        ("hermes", "<tool_call>"),
        ("llama4", '<|python_end|>{"type":{'),
    ):
        num_skips = 0
        assert "".join(part.text for part in parts_of(form, [word * 500]) if isinstance(part, Content)) in (
            word * 500,
            word.removeprefix("<|python_end|>") * 500,
        )
        assert num_skips < 6000


def test_descriptions_of_users_are_read_or_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text('reasoning: ["<a>", "</a>"]\ncalls: {body: json, call: ["<c>", "</c>"], name_close: ":"}\n')
    form = read_format_file(file)
    reader = AnswerReader(form, TOOLS)
    assert message([*reader.read("<a>hm</a>Hi<c>clock:{}</c>"), *reader.end()]) == [
        Reasoning("hm"),
        Content("Hi"),
        CLOCK,
    ]
    for value, error in (
        ([], "own=list is not a mapping: give reasoning, limit_text, answer, calls, stops"),
        ({"cals": {}}, "own.cals is not a field: there are reasoning, limit_text, answer, calls, stops"),
        ({"calls": {"body": "xml"}}, "own.calls.body='xml' is not allowed: give one of object, json, tagged"),
        ({"calls": {"body": "json", "max_calls": 2}}, "own.calls.max_calls=2 is not allowed: give 1, or leave it out"),
        ({"reasoning": "<think>"}, "own.reasoning='<think>' is not a list"),
        ({"reasoning": ["a", "b", "c"]}, "own.reasoning has 3 texts: give open, close"),
        ({"stops": ["x" * 201]}, "is not a text of at most 200 characters"),
        ({"calls": {"call": ["<c>"]}}, "own.calls.body is missing"),
    ):
        with pytest.raises(UserError, match=re.escape(error)):
            read_description(value, "own")
    file.write_text("a: [")
    with pytest.raises(UserError, match="cannot be read as a chat format"):
        read_format_file(file)


def test_the_format_is_told_by_template_and_vocabulary() -> None:
    for name, entry in entries().items():
        for texts, template, tokens in (
            (entry.signs.template, " ".join(entry.signs.template), ()),
            (entry.signs.vocabulary, "", entry.signs.vocabulary),
        ):
            assert not texts or name in matching_entries(template, ["<s>", *tokens]), name
    assert matching_entries("<tool_call>", ["<|python_tag|>"]) == ["hermes"]
    assert matching_entries("<tool_call><function=><parameter=", ["<tool_call>"])[0] == "qwen3_coder"
    assert matching_entries("", ()) == []


def test_text_that_spells_a_special_token_is_no_marker() -> None:
    """The first call is spelled in letters, and the second begins with the token 256."""
    call = '{"name": "clock", "arguments": {}}</tool_call>'
    text = f"é <tool_call>{call}\n"
    spelled = list(text.encode())
    pieces = [(chr(0xFFFD) if byte > 127 else chr(byte), [byte]) for byte in spelled]
    pieces += [("<tool_call>", [256]), *((char, [ord(char)]) for char in call), ("</s>", [257])]
    for step in (1, 5, len(pieces)):
        vocabulary = Vocabulary({256: "<tool_call>"}, lambda id: {256: 11, 257: 0}.get(id, 1))
        reader = AnswerReader(entries()["hermes"].form, TOOLS, dropped=["</s>"], vocabulary=vocabulary)
        parts: list[Part] = []
        for i in range(0, len(pieces), step):
            ids = [id for _, token_ids in pieces[i : i + step] for id in token_ids]
            parts += reader.read("".join(letters for letters, _ in pieces[i : i + step]), ids)
        *content, call_value = message([*parts, *reader.end()])
        assert "".join(part.text for part in content).replace(chr(0xFFFD) * 2, "é") == text.strip()
        assert call_value == CLOCK
