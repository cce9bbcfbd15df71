"""The probe finds how a template writes calls and reasoning, and how it takes earlier calls. Its finds are read back."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from models.chat import choice, needles
from models.chat.choice import Choice, choose
from models.chat.description import Body, CallFormat, Span
from models.chat.history import HistoryForm, Ids, NoContent, for_template
from models.chat.needles import Render, Renderings
from models.chat.probe import turn_of
from models.chat.readback import (
    UNQUOTED,
    VALUES,
    answer_text,
    expected_read,
    merged,
    read_parts,
    same,
    written_answers,
)
from models.chat.switch import arguments_of_effort
from models.chat.writer import Call, write_calls
from models.tokenizers import template_process, templates
from models.tokenizers.template_process import TemplateProcess
from tests.helpers.builders import SHARED
from tests.helpers.chat_styles import STYLES

FOLDER = SHARED / "data" / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NUM_READ, NUM_READ_BY_PROBE = 100, 92
"""Least templates that are read back, of the 104 that have the text `tool_call`, with entries and by the probe alone."""
REFUSED = {  # templates with the text `tool_call` that are refused, and why
    "MiroThinker": "'tool' is undefined",
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "mistral-v1": "Assistant message content must be non-empty.",
    "mistral-v1_spm": "Assistant message content must be non-empty.",
}
USER = {"role": "user", "content": "Hi"}


def renderer(template: str) -> Render:
    """Return a function that renders a template in this process."""

    def render(messages: Any, tools: Any, add_generation_prompt: bool, arguments: Mapping[str, Any]) -> str:
        messages, tools = json.loads(json.dumps([messages, tools]))
        variables = {**SPECIAL, **arguments, "add_generation_prompt": add_generation_prompt, "tools": tools}
        try:
            return templates.render(template, messages, variables)
        except Exception as error:
            raise UserError(f"the chat template does not take these messages: {error}") from error

    return render


def chosen(template: str, tokens: list[str] | None = None) -> Choice:
    return choose(renderer(template), template, tokens or [], templates.names(template))


def call(name: str, arguments: str, id: str) -> dict[str, Any]:
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


CALLS = [call("f", '{"a": 1}', "call_one"), call("g", "", "abcdefgh2")]
RESULTS = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("abcdefgh2", "call_one")]
HISTORY = [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, *RESULTS, USER]


def test_every_style_is_found_with_and_without_the_written_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {  # entry, most calls of a message, ids, literals around all calls and around a call
        "chatml": ("qwen3", None, Ids.sent, Span(), Span("<tool_call>\n", "\n</tool_call>")),
        "llama3": ("llama3", 1, Ids.sent, Span(), Span()),
        "mistral": ("mistral", None, Ids.sent, Span("[TOOL_CALLS] [", "]"), Span()),
        "deepseek": (
            "deepseek",
            None,
            Ids.sent,
            Span("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            Span("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),
        ),
        "kimi": (
            "kimi",
            None,
            Ids.counted,
            Span("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            Span("<|tool_call_begin|>", "<|tool_call_end|>"),
        ),
        "glm4": ("glm4", 1, Ids.sent, Span(), Span()),
    }
    for origin in ("entry", "probe"):
        for style, (template, special, added) in STYLES.items():
            name, max_calls, ids, section, around = expected[style]
            result = chosen(template, [*special, *added])
            assert (result.origin, result.history.max_calls, result.history.ids) == (origin, max_calls, ids), style
            assert result.form.calls is not None
            assert result.num_renderings <= 30
            if origin == "entry":
                assert result.name == name
            else:
                assert (result.form.calls.section, result.form.calls.call) == (section, around)
            has_switch = [(item.name, item.off, item.on) for item in result.switches]
            assert has_switch == ([("enable_thinking", False, True)] if style == "chatml" else [])
            text = renderer(template)(for_template(HISTORY, result.history), None, True, {})
            assert [item["content"] in text for item in RESULTS] == [True, True], style
        monkeypatch.setattr(choice, "matching_entries", lambda template, tokens: [])


def test_reasoning_its_prefill_and_its_switches_are_found() -> None:
    body = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<r>{{ m.reasoning_content }}</r>{% endif %}"
        "{% if m.content %}<a>{{ m.content }}</a>{% endif %}"
        "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }}|{{ c.function.arguments | tojson }}</c>{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    )
    template = body + "{% if thinking_budget != 0 %}<r>{% else %}<r></r>{% endif %}{% endif %}"
    result = chosen(template)
    assert result.form.reasoning == Span("<r>", "</r>")
    assert result.form.answer == Span("<a>", "</a>")
    assert result.form.begun(renderer(template)([{"role": "user", "content": "Hi"}], None, True, {})) == "<r>"
    assert [(s.name, s.off, s.takes_budget) for s in result.switches] == [("thinking_budget", 0, True)]
    result = chosen(body + "{{ 'Effort: ' ~ reasoning_effort }}{% if enable_thinking %}<r>{% endif %}{% endif %}")
    assert [(s.name, s.off, s.on, s.levels) for s in result.switches] == [
        ("enable_thinking", False, True, ()),
        ("reasoning_effort", None, None, ("low", "medium", "high")),  # any word is printed: none switches nothing off
    ]
    efforts = {effort: arguments_of_effort(result.switches, effort) for effort in ("none", "minimal", "medium", "max")}
    assert efforts == {
        "none": ({"enable_thinking": False}, "none"),
        "minimal": ({"enable_thinking": True, "reasoning_effort": "low"}, "low"),
        "medium": ({"enable_thinking": True, "reasoning_effort": "medium"}, "medium"),
        "max": ({"enable_thinking": True, "reasoning_effort": "high"}, "high"),
    }
    assert arguments_of_effort(result.switches[:1], "low") == ({"enable_thinking": True}, "")
    assert arguments_of_effort((), "low") == ({}, None)
    known = "{% if reasoning_effort | default('max') not in ('none', 'max') %}{{ raise_exception('no') }}{% endif %}"
    result = chosen(body + known + "{{ reasoning_effort }}{% endif %}")
    assert [(s.name, s.off, s.levels) for s in result.switches] == [("reasoning_effort", "none", ("max",))]


def test_the_history_takes_the_form_that_a_template_needs() -> None:
    def messages(form: HistoryForm) -> list[dict[str, Any]]:
        return for_template(HISTORY, form)

    (_, sent, *results, _) = messages(HistoryForm())
    assert sent == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "call_one", "function": {"name": "f", "arguments": {"a": 1}}},
            {"type": "function", "id": "abcdefgh2", "function": {"name": "g", "arguments": {}}},
        ],
    }
    assert results == RESULTS
    assert HISTORY[1]["tool_calls"] == CALLS  # the request stays as it is
    assert "content" not in messages(HistoryForm(NoContent.absent))[1]
    assert messages(HistoryForm(NoContent.null))[1]["content"] is None
    texts = [item["function"]["arguments"] for item in messages(HistoryForm(has_text_arguments=True))[1]["tool_calls"]]
    assert texts == ['{"a": 1}', "{}"]
    (_, short, second, first, _) = messages(HistoryForm(ids=Ids.short))
    assert [item["id"] for item in short["tool_calls"]] == [first["tool_call_id"], "abcdefgh2"]
    assert re.fullmatch("[0-9a-f]{9}", first["tool_call_id"])
    assert second["tool_call_id"] == "abcdefgh2"
    twice = for_template(HISTORY * 2, HistoryForm(ids=Ids.counted))
    assert [item["tool_call_id"] for item in twice if item["role"] == "tool"] == [
        "functions.g:1",
        "functions.f:0",
        "functions.g:3",
        "functions.f:2",
    ]
    split = messages(HistoryForm(max_calls=1))
    assert [item.get("tool_call_id", item["role"]) for item in split] == [
        "user",
        "assistant",
        "call_one",
        "assistant",
        "abcdefgh2",
        "user",
    ]
    assert messages(HistoryForm(is_flat=True))[1]["tool_calls"][0]["arguments"] == {"a": 1}
    said = {"role": "assistant", "content": "Well", "reasoning_content": "hm", "tool_calls": CALLS}
    assert for_template([said], HistoryForm(drops_content=True))[0]["content"] == ""
    assert "reasoning_content" not in for_template([said], HistoryForm(drops_reasoning=True))[0]
    form = chosen(STYLES["chatml"][0]).form.calls
    assert isinstance(form, CallFormat)
    (written,) = for_template([said], HistoryForm(written=form))
    expected = write_calls(form, [Call("f", {"a": 1}, "call_one"), Call("g", {}, "abcdefgh2")])
    assert written == {"role": "assistant", "content": f"Well\n{expected}", "reasoning_content": "hm"}
    broken = [{"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": ', "x")]}]
    assert for_template(broken, HistoryForm())[0]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_hostile_templates_are_refused_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    dump = "{{ messages | tojson }}"
    hostile = {
        "{{ raise_exception('never') }}": "never",
        "{{": "does not take these messages",
        "": "writes no calls",
        "{{ tools }}": "writes no calls",
        "{{ messages[0].content }}{{ 'fzq gzq vzqc {' * 4000 }}": "cannot be read back",
        dump + "{{ range(99999) | random }}" + dump: "cannot be read back",
        dump + "{{ 'x' * 70000 }}": "writes 7[0-9]{4} characters, more than 65536",
        "{{ '<a>' * 9000 }}" + dump + "{{ '<a>' * 9000 }}" + dump: "cannot be read back",
        "{{ '{\"a\":' * 9000 }}" + dump + "{{ '[' * 9000 }}": "cannot be read back",
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<' * 4000 }}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{{ '>' * 4000 }}{% endfor %}{% endfor %}": "cannot be read back",
    }
    for template, reason in hostile.items():
        result = choose(renderer(template), template, [])
        assert result.origin == "refused", template
        assert re.search(reason, result.reason), (template, result.reason)
        assert result.form.calls is None
        assert "\n" not in result.reason
        assert result.num_renderings <= needles.MAX_RENDERINGS
    monkeypatch.setattr(template_process, "CPU_S", 0.15)
    monkeypatch.setattr(needles, "MAX_S", 0.1)
    process, loops = TemplateProcess(), "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

    def stopped(messages: Any, tools: Any, add_generation_prompt: bool, arguments: Mapping[str, Any]) -> str:
        return process.render(loops, messages, SPECIAL, add_generation_prompt, tools, arguments)

    result = choose(stopped, loops, ["<tool_call>", "</tool_call>"])
    assert (result.origin, result.reason) == ("refused", "the probe of the chat template takes more than 0.1 s")


def test_the_sandbox_gives_what_templates_of_calls_need() -> None:
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": []}

    def text(template: str) -> str:
        return templates.render(template, [message], {})

    assert text("{{ messages[0].content is none }} {{ messages[0].name is defined }}") == "True False"
    assert text("{% set a = [] %}{% set _ = a.append(1) %}{% set _ = a.append(2) %}{{ a.pop(0) }}{{ a }}") == "1[2]"
    assert text("""{{ ('{"a": [1]}' | from_json).a[0] }}""") == "1"
    assert text("{{ [{'a': 1}] | map(attribute='a') | tojson }}") == "[1]"
    for refused in ("{{ messages[0].update(a=1) }}", "{{ {}.pop('a', 1) }}", "{{ [].clear() }}"):
        with pytest.raises(Exception, match="unsafe"):
            text(refused)


def texts_of(path: Path) -> tuple[Choice, list[tuple[str, dict[str, Any], Any]]]:
    """Return the choice for a template, and the answers that it writes: text behind the user's, message, and turn."""
    template = path.read_text("utf-8-sig")
    try:
        names = templates.names(template)
    except Exception:
        names = []
    result = choose(renderer(template), template, [], names)
    if result.form.calls is None or result.history.written:
        return result, []
    renderings = Renderings(renderer(template))
    turn = turn_of(renderings, result.history)
    values = UNQUOTED if result.form.calls.body is Body.python else VALUES  # one template escapes no quotes
    return result, [(text, message, turn) for text, message in written_answers(renderings, result.history, values)]


@pytest.mark.skipif(not FOLDER.exists(), reason="no templates next to the repository")
@pytest.mark.long
def test_the_families_templates_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {path.stem: path for path in sorted(FOLDER.glob("*.jinja"))}
    mention_calls = {name for name, path in paths.items() if "tool_call" in path.read_text("utf-8")}
    assert (len(paths), len(mention_calls)) == (131, 104)
    refused, origins = {}, Counter[str]()
    for name in sorted(mention_calls):
        result, answers = texts_of(paths[name])
        origins[result.origin] += 1
        assert result.num_renderings <= 40, name
        if result.origin == "refused":
            refused[name] = result.reason
            continue
        assert answers or result.history.written, name
    print(origins)
    assert {name: reason.partition(": ")[2] for name, reason in refused.items()} == REFUSED
    assert origins.total() - origins["refused"] >= NUM_READ
    monkeypatch.setattr(choice, "matching_entries", lambda template, tokens: [])
    alone = Counter(chosen(paths[name].read_text("utf-8-sig")).origin for name in mention_calls)
    assert alone["probe"] >= NUM_READ_BY_PROBE


@pytest.mark.skipif(not FOLDER.exists(), reason="no templates next to the repository")
@pytest.mark.matrix
def test_their_calls_are_read_in_pieces_cut_anywhere() -> None:
    known = set[tuple[Any, ...]]()
    for path in sorted(FOLDER.glob("*.jinja")):
        result, answers = texts_of(path)
        for tail, message, turn in answers:
            text = answer_text(tail, result.form, turn)
            if (result.form, turn.header, text) in known:
                continue
            known.add((result.form, turn.header, text))
            complete = merged(read_parts(result.form, turn, [text]))
            assert same(complete, tail, message), (path.stem, complete, expected_read(tail, message))
            for position in range(len(text) + 1):
                pieces = merged(read_parts(result.form, turn, [text[:position], text[position:]]))
                assert pieces == complete, (path.stem, position)
            assert merged(read_parts(result.form, turn, text)) == complete, path.stem
    assert len(known) > 50
