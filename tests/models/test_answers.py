"""Answers of models: content, reasoning and tool calls, independent of the split into pieces."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from models.tokenizers.answers import FORMATS, SIGNS, AnswerReader, Content, Part, Reasoning, find_format
from models.tokenizers.tool_calls import ToolCall
from tests.helpers.cases import each

NAMES = ("weather", "clock")
ARGUMENTS = {"city": '北京 "x"', "n": [1, 2.5, None, True], "o": {}}
JSON = json.dumps(ARGUMENTS)
CALL = ToolCall("weather", json.dumps(ARGUMENTS, ensure_ascii=False))
CLOCK = ToolCall("clock", "{}")


def parts_of(
    form: str, pieces: list[str], names: tuple[str, ...] = NAMES, reasons: bool = False
) -> tuple[list[Part], bool]:
    """Return the parts of an answer that arrives in pieces, with adjacent parts of a kind joined, and whether a call
    was broken."""
    reader = AnswerReader(FORMATS[form], names, reasons)
    parts: list[Part] = []
    for part in [part for piece in pieces for part in reader.read(piece)] + reader.end():
        last = parts[-1] if parts else None
        if isinstance(part, Content | Reasoning) and isinstance(last, Content | Reasoning) and type(part) is type(last):
            parts[-1] = type(part)(last.text + part.text)
        else:
            parts.append(part)
    return parts, reader.has_broken_call


CASES: list[tuple[str, str, list[Part]]] = [
    ("hermes", "Just text. \n", [Content("Just text. \n")]),
    ("hermes", "<think>\nhm\n</think>\n\nFine.\n", [Reasoning("hm"), Content("Fine.\n")]),
    ("hermes", "<think>\n\n</think>\n\nFine.", [Content("Fine.")]),
    ("hermes", "<think>cut by len", [Reasoning("cut by len")]),
    (
        "hermes",
        f'Look:\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>{"name":"clock","arguments":{}}</tool_call>\n',
        [Content("Look:"), CALL, CLOCK],
    ),
    ("hermes", '<tool_call>\n{"name": "clock", "arguments": {}}', [CLOCK]),  # ended without the closing literal
    ("llama3", f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}', [CALL]),
    ("llama3", f' {{"name": "weather", "parameters": {JSON}}}; {{"name": "clock", "parameters": {{}}}}', [CALL, CLOCK]),
    ("llama3", '{"name": "unknown", "parameters": {}}', [Content('{"name": "unknown", "parameters": {}}')]),
    ("llama3", '{"any": "json"} ', [Content('{"any": "json"} ')]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock", "arguments": {{}}}}]',
        [CALL, CLOCK],
    ),
    (
        "mistral",
        f"So.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{{}}",
        [Content("So."), CALL, CLOCK],
    ),
    ("mistral", "[THINK]hm[/THINK]Fine", [Reasoning("hm"), Content("Fine")]),
    (
        "deepseek",
        "<think>hm</think>Ok\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Reasoning("hm"), Content("Ok"), CALL, CLOCK],
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [CALL],
    ),
    (
        "kimi",
        "<think>hm</think>Ok\n<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|> functions.clock:11 "
        "<|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>",
        [
            Reasoning("hm"),
            Content("Ok"),
            replace(CALL, id="functions.weather:0"),
            replace(CLOCK, id="functions.clock:11"),
        ],
    ),
    (
        "kimi",  # truncated after the arguments; a name with the separator
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b:c:2<|tool_call_argument_begin|>{}",
        [ToolCall("a.b:c", "{}", "functions.a.b:c:2")],
    ),
    ("chatglm3", "\n 你好\n", [Content("你好\n")]),
    (
        "chatglm3",
        f"weather\n ```python\ntool_call({', '.join(f'{k}={v!r}' for k, v in ARGUMENTS.items())})\n```",
        [CALL],
    ),
    ("chatglm3", "weather is fine", [Content("weather is fine")]),
    ("glm4", "\nFine.", [Content("Fine.")]),
    ("glm4", f"weather\n{JSON}", [CALL]),
    ("glm4", "clock\n{}", [CLOCK]),
    ("glm4", "cloc", [Content("cloc")]),
    ("text", "<think>a</think>b <tool_call>", [Reasoning("a"), Content("b <tool_call>")]),
]


@each("form, text, parts", CASES)
def test_parts_of_each_format_whole_and_letter_by_letter(form: str, text: str, parts: list[Part]) -> None:
    assert parts_of(form, [text]) == (parts, False)
    assert parts_of(form, list(text)) == (parts, False)


BROKEN = [
    ("hermes", "a <tool_call>{'name': 1}</tool_call> b"),
    ("hermes", '<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "clock", "arg'),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", '[TOOL_CALLS] [{"name": "clock"}]'),
    ("mistral", "[TOOL_CALLS]clock[ARGS]"),
    ("deepseek", "<｜tool▁calls▁begin｜>clock<｜tool▁calls▁end｜>\n"),
    ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    *(
        ("kimi", f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>")
        for call in (
            "functions.clock:0{}",
            "functions.clock<|tool_call_argument_begin|>{}",
            "clock:0<|tool_call_argument_begin|>{}",
            "functions.clock:x<|tool_call_argument_begin|>{}",
            "functions.:0<|tool_call_argument_begin|>{}",
            "functions.clock:0<|tool_call_argument_begin|>[]",
        )
    ),
]


@each("form, text", BROKEN)
def test_a_broken_call_stays_content_and_is_told(form: str, text: str) -> None:
    assert parts_of(form, [text]) == ([Content(text)], True)


@each(
    "code",
    [
        "__import__('os').system('x')",
        "tool_call(a=open('x'))",
        "tool_call(1)",
        "tool_call(**{'a': 1})",
        "tool_call(a={1})",
        "tool_call(a=1e999)",
        "tool_call(",
        "(" * 5000,
    ],
)
def test_python_of_an_answer_is_never_run(code: str) -> None:
    text = f"clock\n```python\n{code}\n```"
    assert parts_of("chatglm3", [text])[0] == [Content(text)]


def test_without_tools_calls_are_content() -> None:
    for form, text, parts in CASES:
        if any(isinstance(part, ToolCall) for part in parts):
            assert not any(isinstance(part, ToolCall) for part in parts_of(form, [text], ())[0])
    text = '{"name": "clock", "parameters": {}}'
    assert parts_of("llama3", list(text), ()) == ([Content(text)], False)


def test_reasoning_that_the_prompt_began() -> None:
    for pieces in (["\nhm </think>\n\nFine"], list("\nhm </think>\n\nFine")):
        assert parts_of("deepseek", pieces, reasons=True) == ([Reasoning("hm"), Content("Fine")], False)


def test_special_tokens_that_are_not_part_of_an_answer_are_dropped() -> None:
    for text in ("Fine</s>", "</s>Fi</s>ne"):
        for pieces in ([text], list(text)):
            reader = AnswerReader(FORMATS["mistral"], NAMES, dropped=["</s>"])
            parts = [part for piece in pieces for part in reader.read(piece)] + reader.end()
            assert "".join(part.text for part in parts if isinstance(part, Content)) == "Fine"
    reader = AnswerReader(FORMATS["mistral"], NAMES, dropped=["</s>"])
    assert [*reader.read("a</</s>s></"), *reader.end()] == [Content("a</s>"), Content("</")]


def test_text_is_not_held_back_longer_than_it_may_be_a_literal() -> None:
    reader = AnswerReader(FORMATS["hermes"], NAMES)
    assert [reader.read(piece) for piece in ("a<", "b", "<tool", "s>", " c")] == [
        [Content("a")],
        [Content("<b")],
        [],
        [Content("<tools>")],
        [Content(" c")],
    ]
    assert AnswerReader(FORMATS["llama3"], NAMES).read("No") == [Content("No")]


ALPHABET = [
    "<",
    "think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CASES[4][1],
    "[TOOL_CALLS]",
    "[ARGS]",
    "clock",
    "\n",
    " ",
    "{}",
    JSON,
]
ALPHABET += [
    "<|python_tag|>",
    '{"name": "clock", "parameters": {}}',
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "weather\n",
    "x",
    "]",
]


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(ALPHABET), max_size=8), st.booleans(), st.data())
def test_no_cutting_changes_the_parts(form: str, words: list[str], reasons: bool, data: Any) -> None:
    text = "".join(words)
    shards = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[begin:end] for begin, end in zip([0, *shards], [*shards, len(text)], strict=True)]
    expected = parts_of(form, [text], reasons=reasons)
    assert parts_of(form, pieces, reasons=reasons) == expected
    assert parts_of(form, list(text), reasons=reasons) == expected


@given(st.sampled_from(sorted(FORMATS)), st.text("a <{\n[t"))
def test_text_without_regions_is_content_to_the_letter(form: str, text: str) -> None:
    expected = text.lstrip(" \n") if FORMATS[form].is_trimmed else text
    assert parts_of(form, [text]) == ([Content(expected)] if expected else [], False)


def test_the_format_is_told_by_template_and_vocabulary() -> None:
    for name, sign in SIGNS.items():
        assert find_format(f"{{{{ '{sign}' }}}}", ()) == name
        assert find_format("{{ messages }}", ["<s>", sign]) == name
    assert find_format("<tool_call>", ["<|python_tag|>"]) == "hermes"
    assert find_format("<tool_call><function=", ["<tool_call>"]) == "text"
    assert find_format(None, ()) == "text"
