"""Derive the description of a chat format from a template, by rendering conversations with needles."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from models.chat.cuts import are_twins, common_end, common_start, first_marker_end, last_marker
from models.chat.description import MAX_LITERAL, Body, CallFormat, ChatFormat, Span
from models.chat.history import HistoryForm, Ids, Message, NoContent
from models.chat.locate import Place, locate
from models.chat.needles import (
    ARGUMENTS,
    CONTENT,
    FIRST,
    REASONING,
    RESULT,
    SECOND,
    SECOND_USER,
    TEXT,
    USER,
    Renderings,
    answer,
    call,
    call_id,
    user,
)

PAIRS = (Span("<think>", "</think>"), Span("[THINK]", "[/THINK]"), Span("<seed:think>", "</seed:think>"))
"""Markers of reasoning that templates mention without writing them around an earlier answer's reasoning."""
LONG_ID = "call_zq0123456789abcdef"
CALLS = [call(FIRST, ARGUMENTS, 0), call(SECOND, ARGUMENTS, 1)]


@dataclass(frozen=True)
class Turn:
    """The texts that a template writes before and after an answer."""

    header: str
    ending: str


def histories(renderings: Renderings) -> Iterator[HistoryForm]:
    """Yield the forms of the history in which a template writes calls, likeliest first."""
    for max_calls in (None, 1):
        num_yielded = 0
        for is_text in (False, True):
            forms = [HistoryForm(no_content, is_text, max_calls=max_calls) for no_content in NoContent]
            if known := [form for form in map(partial(_with_calls, renderings), forms) if form]:
                yield min(known, key=lambda form: len(_calls_text(renderings, form)))  # without an empty answer
                num_yielded += 1
        if num_yielded:
            return
    if has_calls(renderings, flat := HistoryForm(is_flat=True, max_calls=1)):
        yield flat


def _with_calls(renderings: Renderings, history: HistoryForm) -> HistoryForm | None:
    """Return a form in which the template writes calls; None if it does not. The ids may take the place of names."""
    if has_calls(renderings, history):
        return history
    counted = replace(history, ids=Ids.counted)
    return counted if call_id(0) in _calls_text(renderings, history) and has_calls(renderings, counted) else None


def _calls_text(renderings: Renderings, history: HistoryForm) -> str:
    return tail_of(renderings, [answer(None, CALLS[: history.max_calls])], history) or ""


def has_calls(renderings: Renderings, history: HistoryForm) -> bool:
    """Return whether the template writes the names and values of an answer's calls, and no "None" for its content."""
    tail = _calls_text(renderings, history)
    names = [item["function"]["name"] for item in CALLS[: history.max_calls]]
    return all(needle in tail for needle in (*names, TEXT)) and "None" not in tail[: tail.find(FIRST)]


def takes_calls(renderings: Renderings) -> bool:
    """Return whether the template renders messages with calls, even if it omits the calls."""
    return any(renderings.text([user(), answer(None, CALLS)], HistoryForm(form)) is not None for form in NoContent)


def tail_of(renderings: Renderings, messages: Sequence[Message], history: HistoryForm) -> str | None:
    """Return the text behind the user's message; None if the template refuses the messages."""
    return renderings.behind(USER, [user(), *messages], history)


def settled(renderings: Renderings, history: HistoryForm) -> HistoryForm:
    """Return a form of the history whose ids, content and reasoning the template takes, too."""
    tail = tail_of(renderings, [answer(CONTENT, CALLS[:1])], history) or ""
    history = replace(history, drops_content=FIRST not in tail and FIRST in _calls_text(renderings, history))
    if history.ids is Ids.sent:
        long = call(FIRST, ARGUMENTS, 0) | {"id": LONG_ID}
        result = {"role": "tool", "tool_call_id": LONG_ID, "name": FIRST, "content": RESULT}
        messages = [user(), answer(None, [long]), result]
        if renderings.text(messages, history) is None:
            short = replace(history, ids=Ids.short)
            history = short if renderings.text(messages, short) is not None else history
    messages = [user(), answer(CONTENT, reasoning=REASONING)]
    plain = [user(), answer(CONTENT)]
    is_refused = renderings.text(messages, history) is None and renderings.text(plain, history) is not None
    return replace(history, drops_reasoning=is_refused)


def turn_of(renderings: Renderings, history: HistoryForm) -> Turn | None:
    """Return what a template writes around every answer; None if it refuses plain answers."""
    last = tail_of(renderings, [answer(CONTENT)], history)
    earlier = renderings.behind(USER, [user(), answer(CONTENT), user(SECOND_USER)], history)
    reasoned = tail_of(renderings, [answer(CONTENT, reasoning=REASONING)], history)
    reasoned_calls = tail_of(renderings, [answer(None, CALLS[:1], REASONING)], history)
    calls = _calls_text(renderings, history)
    if last is None:
        return None
    ending = common_end(last, calls) if calls else last[last.rfind(CONTENT) + len(CONTENT) :]
    header = common_start(last, *(text for text in (earlier, reasoned, reasoned_calls, calls) if text))
    prompt, alone = (renderings.behind(USER, [user()], history, prompts=prompts) or "" for prompts in (True, False))
    if len(prompt) > len(alone) and header.startswith(prompt):
        header = prompt  # the rest is the model's
    return Turn(header, ending)


def is_split(renderings: Renderings, history: HistoryForm, turn: Turn) -> bool:
    """Return whether the template writes each call of an answer as a message of its own, as GLM-4's does."""
    header = turn.header.strip()
    text = _calls_text(renderings, history)[len(turn.header) :]
    return first_marker_end(header) is not None and turn.ending.strip() + header in text


def derive(renderings: Renderings, history: HistoryForm, turn: Turn, template: str) -> ChatFormat | None:
    """Return the description of the format in which a template writes answers; None if its calls are not readable."""
    text = _calls_text(renderings, history)
    first = locate(text, FIRST, call_id(0))
    if not first or first.start < len(turn.header):
        return None
    second = None if history.max_calls else locate(text, SECOND, call_id(1), first.end)
    if not second and not history.max_calls:
        return None
    reasoning = find_reasoning(renderings, history, turn, template)
    calls, stops = _calls(text, turn, [first, second] if second else [first], reasoning)
    if any(len(literal) > MAX_LITERAL for literal in ChatFormat(reasoning, calls=calls).literals):
        return None
    if answer_span := _answer_before_calls(renderings, history, turn, calls):
        calls = replace(calls, section=calls.section._replace(open=""))
    else:
        answer_span = _answer(renderings, history, turn, reasoning, calls)
    return ChatFormat(reasoning, answer=answer_span, calls=calls, stops=stops)


def find_reasoning(renderings: Renderings, history: HistoryForm, turn: Turn, template: str) -> Span | None:
    """Return the literals around reasoning. The opening is empty if every prompt begins the reasoning without one."""
    variants = [[answer(CONTENT, reasoning=REASONING)], [answer(None, CALLS[:1], REASONING)]]
    for messages in variants:
        text = tail_of(renderings, messages, history) or ""
        start = text.find(REASONING)
        if start < len(turn.header):
            continue
        before, after = text[len(turn.header) : start], text[start + len(REASONING) :]
        end = first_marker_end(after)
        close = after[:end]
        if end is None or any(needle in close for needle in (CONTENT, FIRST)):
            continue
        marker = last_marker(before)
        if marker is not None:
            return Span(before[marker:], close)
        marker = last_marker(turn.header)
        is_begun = marker is not None and are_twins(turn.header[marker:], close)
        return Span(turn.header[marker:] if is_begun else "", close)
    return next((span for span in PAIRS if span.open in template and span.close in template), None)


def _calls(text: str, turn: Turn, places: list[Place], reasoning: Span | None) -> tuple[CallFormat, tuple[str, ...]]:
    """Return the description of the calls at these places, and the texts of tokens that end an answer with calls."""
    first, last = places[0], places[-1]
    before = _without_reasoning(text[len(turn.header) : first.start], reasoning).lstrip()
    behind = text[last.end : len(text) - len(turn.ending)].rstrip()
    middle = text[first.end : last.start] if len(places) == 2 else None
    if middle is None:
        open, close, separator = before, behind, ""
    else:
        open = common_end(text[: first.start], middle).lstrip()
        before = max(before, open, key=len)
        middle = middle[: len(middle) - len(open)]
        close = common_start(middle, behind).rstrip()
        separator = middle[len(close) :]
    section = Span(before[: len(before) - len(open)], behind[len(close) :])
    call_span, stops = Span(open, close), tuple[str, ...]()
    if not section.open and section.close.strip():  # a closing literal alone ends the turn
        stops, section = (section.close.strip(),), Span()
    form = replace(first.form, section=section, call=call_span, separator=separator)
    form = replace(form, max_calls=1) if middle is None else form
    return _tagged(form) if form.body is Body.tagged else _with_id_form(form, text, places), stops


def _tagged(form: CallFormat) -> CallFormat:
    """Return the description with the text between values, keys and closers divided at the tags' borders."""
    between, tag = form.tag.key_open, form.tag
    key_open = common_end(form.name_close, between)
    value_close = between[: len(between) - len(key_open)]
    close = form.call.close.removeprefix(value_close)
    return replace(
        form,
        name_close=form.name_close[: len(form.name_close) - len(key_open)],
        tag=tag._replace(key_open=key_open, value_close=value_close),
        call=Span(form.call.open, close),
    )


def _with_id_form(form: CallFormat, text: str, places: list[Place]) -> CallFormat:
    """Return the description with the form of ids that a template counts itself."""
    first, last = places[0], places[-1]
    if form.body is Body.object and form.keys.id:
        written = json.loads(text[first.start : first.end]).get(form.keys.id)
        return replace(form, id_form="{index}") if written == "0" else form
    counts = [re.match(r"(:)(\d+)", place.form.name_close) for place in (first, last)]
    if form.body is not Body.json or not all(count and count[2] == str(i) for i, count in enumerate(counts)):
        return form
    prefix = re.search(r"[\w.]*$", form.call.open)
    word = prefix[0] if prefix else ""
    return replace(
        form,
        call=form.call._replace(open=form.call.open.removesuffix(word)),
        name_close=form.name_close[2:],
        id_form=f"{word}{{name}}:{{index}}",
    )


def _answer_before_calls(renderings: Renderings, history: HistoryForm, turn: Turn, calls: CallFormat) -> Span | None:
    """Return the literals around text in front of calls, if the template also writes them without text."""
    text = tail_of(renderings, [answer(CONTENT, CALLS[:1])], history) or ""
    before, _, behind = text[len(turn.header) :].partition(CONTENT)
    behind = behind[: len(calls.section.open)]
    for size in range(len(behind)) if before.strip() else ():
        if before.strip() + behind[: len(behind) - size] == calls.section.open:
            return Span(before.strip(), behind[: len(behind) - size])
    return None


def _answer(
    renderings: Renderings, history: HistoryForm, turn: Turn, reasoning: Span | None, calls: CallFormat
) -> Span | None:
    """Return the literals around the text of answers; None if there are none."""
    text = tail_of(renderings, [answer(CONTENT)], history) or ""
    start = text.find(CONTENT)
    before = _without_reasoning(text[len(turn.header) : start], reasoning)
    behind = text[start + len(CONTENT) : len(text) - len(turn.ending)]
    if not before.strip():  # a mere closing literal ends the turn
        return None
    if calls.call.open.strip() and turn.header.endswith(calls.call.open):
        before = calls.call.open + before
    return Span(before.lstrip(), behind.rstrip())


def _without_reasoning(text: str, reasoning: Span | None) -> str:
    """Return a text without empty reasoning at its beginning."""
    if reasoning and (close := reasoning.close.strip()) and close in text:
        return text[text.index(close) + len(close) :]
    return text
