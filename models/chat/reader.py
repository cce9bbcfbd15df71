"""Read a model's answer while it arrives: content, reasoning and tool calls, by the description of its chat format.

A call's name is passed on once it is complete and one of the offered tools. Then the arguments follow in pieces, and
their sum does not depend on how the answer is cut. Nothing that was passed on is taken back.
"""

from collections.abc import Iterable, Sequence

from models.chat.calls import CallReader, Tools
from models.chat.description import ChatFormat
from models.chat.harmony import read_harmony
from models.chat.parts import Part, PartWriter
from models.chat.special_tokens import SpecialTokens, Vocabulary
from models.chat.stream import Reading, TextStream


class AnswerReader:
    """Reads one answer."""

    def __init__(
        self,
        form: ChatFormat,
        tools: Tools | None = None,
        begun: str = "",
        dropped: Iterable[str] = (),
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`begun`: the literal with which the prompt begins the answer, for example the opening of the reasoning.

        `dropped`: special tokens to remove from the text, if the tokenizer has not removed them. `vocabulary`: tells a
        special token from text that spells it. Without tools, calls are content.
        """
        self._form = form if tools else form.without_calls()
        self._stream = TextStream()
        self._writer = PartWriter(is_trimmed=form.answer is not None and form.answer.open.isspace())
        calls = form.calls if tools else None
        self._calls = CallReader(calls, tools, self._stream, self._writer) if tools and calls else None
        self._tokens = SpecialTokens(dropped, vocabulary)
        self._markers = None if vocabulary is None else frozenset(vocabulary.markers.values())
        """Texts of special tokens; None: every literal may be one."""
        self._reading: Reading[None] | None = self._read_answer()
        self._stream.add(begun)

    @property
    def has_cut_call(self) -> bool:
        """Whether the arguments of a call are incomplete, or are no arguments."""
        return self._calls is not None and self._calls.has_cut_call

    def read(self, text: str, token_ids: Sequence[int] = ()) -> list[Part]:
        """Return the parts that are certain after the next piece of text.

        `token_ids`: the next tokens. They may be ahead of the text.
        """
        self._stream.add(self._tokens.read(text, token_ids))
        return self._advance()

    def end(self, is_cut: bool = False) -> list[Part]:
        """Return the remaining parts at the end of the answer. `is_cut`: the answer reached its length limit."""
        self._stream.add(self._tokens.end())
        self._stream.is_complete = True
        if self._calls is not None:
            self._calls.is_cut = is_cut
        self._advance()
        self._writer.end()
        return self._writer.take()

    def _advance(self) -> list[Part]:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
        return self._writer.take() if not self._stream.is_complete else []

    def _read_answer(self) -> Reading[None]:
        """Read text, reasoning and calls in turn until the answer ends."""
        if self._form.has_messages:
            yield from read_harmony(self._stream, self._writer, self._calls)
            return
        reasoning, answer = self._form.reasoning, self._form.answer
        if reasoning and not reasoning.open:
            yield from self._read_reasoning()
        openings = self._openings()
        is_beginning, is_answer_open = True, False
        while True:
            if self._calls and is_beginning:
                is_beginning = False
                if (yield from self._calls.read_bare()):
                    self._writer.begin_part()
                    continue
            opening = yield from self._stream.until(openings, self._writer.content)
            if not opening:
                return
            is_call = self._calls is not None and opening in self._calls.openings
            is_close = answer is not None and is_answer_open and opening == answer.close.strip()
            if not (is_call or is_close or self._counts(opening)):
                self._writer.content(opening)
            elif reasoning and opening == reasoning.open.strip():
                self._writer.begin_part()
                yield from self._read_reasoning()
                is_beginning = True
            elif answer and opening in (answer.open, answer.close, *(text.strip() for text in answer)):
                self._writer.begin_part()
                is_beginning, is_answer_open = True, opening == answer.open.strip()
            elif self._calls and (yield from self._calls.read(opening, self._writer.content)):
                self._writer.begin_part()

    def _counts(self, literal: str) -> bool:
        """Return whether a literal is a marker: a special token, or text at a line's beginning, not text about it."""
        is_special = self._markers is None or any(marker in literal for marker in self._markers)
        return is_special or self._writer.at_line_start

    def _openings(self) -> tuple[str, ...]:
        spans = [span for span in (self._form.reasoning, self._form.answer) if span]
        texts = [span.open.strip() for span in spans]
        if self._form.answer:
            texts.append(self._form.answer.close.strip())
        if self._calls:
            texts += self._calls.openings
        return tuple(dict.fromkeys(filter(None, texts)))

    def _read_reasoning(self) -> Reading[None]:
        """Read reasoning up to its closing literal, or up to a call. A call's literal counts at a line's beginning."""
        assert self._form.reasoning
        close = self._form.reasoning.close.strip()
        openings = self._calls.openings if self._calls else ()
        while literal := (yield from self._stream.until((close, *openings), self._writer.reasoning)):
            if literal == close:
                break
            assert self._calls
            if not (self._writer.at_line_start if self._markers is None else self._counts(literal)):
                self._writer.reasoning(literal)
            elif (yield from self._calls.read(literal, self._writer.reasoning)):
                break
        self._writer.begin_part()
