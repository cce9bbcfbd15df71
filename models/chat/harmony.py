"""Read answers that consist of messages whose headers name a channel or a recipient.

gpt-oss writes them (github.com/openai/harmony, docs/format.md), and models whose calls are tagged in such messages.
"""

import re

from models.chat.calls import MAX_NAME, CallReader
from models.chat.parts import PartWriter
from models.chat.stream import Reading, TextStream
from models.chat.values import Malformed

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>", START)
ITSELF = "self"
"""Recipient of reasoning in formats without channels."""
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def read_harmony(stream: TextStream, writer: PartWriter, calls: CallReader | None) -> Reading[None]:
    """Read messages until the answer ends. The channel `analysis` is reasoning, a recipient is a tool."""
    while True:
        header: list[str] = []
        if (yield from _begins_header(stream)):
            end = yield from stream.until((MESSAGE,), header.append, MAX_NAME)
            if not end:
                writer.content("".join(header))
        recipient = RECIPIENT.search("".join(header))
        is_reasoning = "analysis" in "".join(header) or (recipient is not None and recipient[1] == ITSELF)
        if recipient and calls and (yield from _read_call(stream, writer, calls, recipient[1])):
            sink = _drop
        else:
            sink = writer.reasoning if is_reasoning else writer.content
        end = yield from stream.until(ENDS, sink)
        if not end:
            return
        writer.begin_part()


def _begins_header(stream: TextStream) -> Reading[bool]:
    """Return whether a header comes next, and not text without one."""
    for literal in (CHANNEL, START, "assistant", " to=", "to=", MESSAGE):
        if (yield from stream.comes(literal)):
            return True
    return False


def _read_call(stream: TextStream, writer: PartWriter, calls: CallReader, name: str) -> Reading[bool]:
    """Read a call. Return False if no tool has the name: the message is text then."""
    for opening in calls.openings:
        yield from stream.skip()
        if (yield from stream.take(opening)):
            return (yield from calls.read(opening, writer.content))
    try:
        calls.start(name)
    except Malformed:
        return False
    try:
        yield from calls.read_json_arguments(ENDS)
    except Malformed:
        calls.note_cut(True)
    return True


def _drop(text: str) -> None:
    """Ignore text between the arguments and the end of the message."""
