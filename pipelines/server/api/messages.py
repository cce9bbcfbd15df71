"""Answers of Anthropic's /v1/messages, from the chunks of chat answers."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from pipelines.server.api.answers import ChoiceText, Event
from pipelines.server.api.errors import ANTHROPIC, ApiError
from pipelines.server.api.writers import ChatWriter

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
BLOCKS: dict[str, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning_content": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Initial content of a block, by the field of the chat delta that opens the block."""


class MessageWriter:
    """Writes a chat answer as an Anthropic message: chunks become content blocks."""

    def __init__(self, chat: ChatWriter) -> None:
        self._chat = chat
        self._num_blocks = 0
        self._open: str | None = None
        """The chat delta's field that opened the current block; None: no block is open."""
        self._ending: dict[str, Any] = {}

    def body(self, choices: list[ChoiceText]) -> dict[str, Any]:
        """Return the answer with the blocks of a stream."""
        blocks: list[dict[str, Any]] = []
        texts: dict[int, str] = {}
        for event in self.read(0, ChoiceText(), choices[0]):
            if event.name == "content_block_start":
                blocks.append(dict(event.data["content_block"]))
            elif event.name == "content_block_delta":
                index, (_, text) = event.data["index"], event.data["delta"].values()
                texts[index] = texts.get(index, "") + text
        for index, block in enumerate(blocks):
            name = {"text": "text", "thinking": "thinking"}.get(block["type"], "input")
            block[name] = _input(texts.get(index, "")) if name == "input" else texts.get(index, "")
        return self._message(blocks) | self._ending | {"usage": _usage(self._chat.usage())}

    def begin(self) -> list[Event]:
        usage = {"input_tokens": len(self._chat.generation.prompts[0]), "output_tokens": 0}
        return [_event("message_start", message=self._message([]) | {"usage": usage})]

    def read(self, index: int, received: ChoiceText, remaining: ChoiceText) -> list[Event]:
        events: list[Event] = []
        for chunk in self._chat.read(index, received, remaining):
            (choice,) = chunk.data["choices"]
            events += self._pieces(choice["delta"])
            if choice["finish_reason"] is not None:
                self._ending = _ending(choice)
        return events

    def end(self) -> list[Event]:
        (chunk,) = self._chat.usage_chunk()
        last = _event("message_delta", delta=self._ending, usage=_usage(chunk.data["usage"]))
        return [*self._close(), last, _event("message_stop")]

    def failed(self, error: ApiError) -> Event:
        return Event(error.body(ANTHROPIC), name="error")

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        info = self._chat.generation.info
        message = {"id": info.id, "type": "message", "role": "assistant", "model": info.model, "content": content}
        more = {"seed": info.seed, "system_fingerprint": info.system_fingerprint}
        return message | {"stop_reason": None, "stop_sequence": None} | more

    def _pieces(self, delta: dict[str, Any]) -> Iterator[Event]:
        for field, block in BLOCKS.items():
            if text := delta.get(field):
                if self._open != field:
                    yield from self._close()
                    yield self._begin(field, block)
                kind = "thinking" if field == "reasoning_content" else "text"
                yield self._delta({"type": f"{kind}_delta", kind: text})
        for call in delta.get("tool_calls", []):
            if "id" in call:
                yield from self._close()
                yield self._begin("tool_calls", _tool_use(call) | {"input": {}})
            if text := call["function"]["arguments"]:
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _begin(self, field: str, block: dict[str, Any]) -> Event:
        self._open = field
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._num_blocks - 1)


def _event(name: str, **fields: Any) -> Event:
    return Event({"type": name, **fields}, name=name)


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object. Of arguments that were cut, the part that is complete."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        try:
            value = json.loads(arguments)  # half a surrogate pair, which becomes a question mark
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _ending(choice: dict[str, Any]) -> dict[str, Any]:
    stop = choice.get("stop_reason")
    if choice["finish_reason"] == "stop" and isinstance(stop, str) and stop != "no_token":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": STOP_REASONS.get(choice["finish_reason"], "end_turn"), "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the token counts. Cached prompt tokens are counted separately."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
