"""Splits the text of an answer into deltas of a chat message: content, reasoning_content and tool_calls."""

import hashlib
from collections.abc import Sequence
from typing import Any

from models.chat.description import ChatFormat
from models.chat.parts import CallArguments, CallStart, Content, Part
from models.chat.reader import AnswerReader

CALL_ID_LENGTH = 9  # Mistral's templates require it


class CallIds:
    """The ids of an answer's calls. Repeated requests get the same ids."""

    def __init__(self, form: ChatFormat, seed: str, first_index: int) -> None:
        """`seed`: source of ids that the format does not define. `first_index`: number of calls in the conversation."""
        id_form = form.calls.id_form if form.calls else ""
        self._id_form = id_form if "{name}" in id_form else ""
        self._seed, self._next_index = seed, first_index
        self._used = set[str]()

    def id(self, call: CallStart, index: int) -> str:
        """Return the id of the answer's call number `index`: the model's own, or one in the format's form."""
        if self._id_form:
            id = call.id or ""
            while not id or id in self._used:
                id = self._id_form.replace("{name}", call.name).replace("{index}", str(self._next_index))
                self._next_index += 1
            self._used.add(id)
            return id
        if call.id is not None:
            return call.id
        return hashlib.sha256(f"{self._seed} {index}".encode()).hexdigest()[:CALL_ID_LENGTH]


class MessageReader:
    """Reads one answer."""

    def __init__(self, reader: AnswerReader, ids: CallIds) -> None:
        self._reader, self._ids = reader, ids
        self._num_calls = 0

    @property
    def has_cut_call(self) -> bool:
        """Whether the arguments of a call are incomplete."""
        return self._reader.has_cut_call

    def read(self, text: str, token_ids: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return the deltas that the next piece of text completes. `token_ids`: the next tokens."""
        return self._deltas(self._reader.read(text, token_ids))

    def end(self, is_cut: bool = False) -> list[dict[str, Any]]:
        """Return the remaining deltas at the end of the answer. `is_cut`: the answer reached its length limit."""
        return self._deltas(self._reader.end(is_cut))

    def _deltas(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, CallStart):
                self._num_calls += 1
                index = self._num_calls - 1
                function = {"name": part.name, "arguments": ""}
                call = {"index": index, "id": self._ids.id(part, index), "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
            elif isinstance(part, CallArguments):
                piece = {"index": self._num_calls - 1, "function": {"arguments": part.text}}
                deltas.append({"tool_calls": [piece]})
            else:
                deltas.append({"content" if isinstance(part, Content) else "reasoning_content": part.text})
        return deltas


def add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to the message so far. Pieces of arguments are joined by the index of their call."""
    for name, value in delta.items():
        if name != "tool_calls":
            message[name] = (message.get(name) or "") + value
            continue
        calls = message.setdefault(name, [])
        for piece in value:
            if "id" in piece:
                calls.append({**piece, "function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
