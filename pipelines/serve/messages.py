"""Answers of /v1/messages: those of chat completions in Anthropic's shapes."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pipelines.api.errors import ApiError
from pipelines.api.messages import error_body
from pipelines.serve.completions import ChatAnswer
from pipelines.serve.generation import Event

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
BLOCKS: dict[str, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning_content": {"type": "thinking", "thinking": "", "signature": ""},
}
"""How blocks begin, by the field of a delta."""


class MessagesAnswer:
    """The answer to a messages request, which a chat request has become."""

    def __init__(self, chat: ChatAnswer, model: str) -> None:
        self._chat = chat
        self._model = model
        self._num_blocks = 0
        self._open: str | None = None
        """Field of the block that has begun."""

    async def accepted(self) -> None:
        """Wait until the engine has taken the request. Raises ApiError for what it refuses."""
        await self._chat.accepted()

    def cancel(self) -> None:
        """Leave the request. Does nothing behind the end."""
        self._chat.cancel()

    async def body(self) -> dict[str, Any]:
        """Return the whole answer. Raises ApiError where the engine fails."""
        chat = await self._chat.body()
        (choice,) = chat["choices"]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        if thought := message.get("reasoning_content"):
            content.append(BLOCKS["reasoning_content"] | {"thinking": thought})
        if said := message["content"]:
            content.append(BLOCKS["content"] | {"text": said})
        content += [
            _tool_use(call) | {"input": json.loads(call["function"]["arguments"])}
            for call in message.get("tool_calls", [])
        ]
        return self._message(chat["id"], content) | _ending(choice) | {"usage": _usage(chat["usage"])}

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events of the stream; where the engine fails, the last one says so."""
        ending: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        has_begun = False
        try:
            async for chunk in self._chat.events():
                if not has_begun:
                    has_begun = True
                    started = {"usage": {"input_tokens": len(self._chat.generation.prompts[0]), "output_tokens": 0}}
                    yield _event("message_start", message=self._message(chunk.data["id"], []) | started)
                if chunk.data.get("usage"):
                    usage = _usage(chunk.data["usage"])
                for choice in chunk.data["choices"]:
                    for event in self._pieces(choice["delta"]):
                        yield event
                    if choice["finish_reason"] is not None:
                        ending = _ending(choice)
        except ApiError as error:
            yield Event(error_body(error), name="error")
            return
        for event in self._close():
            yield event
        yield _event("message_delta", delta=ending, usage=usage)
        yield _event("message_stop")

    def _message(self, id: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        message = {"id": id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return message | {"stop_reason": None, "stop_sequence": None}

    def _pieces(self, delta: dict[str, Any]) -> Iterator[Event]:
        for field, block in BLOCKS.items():
            if text := delta.get(field):
                if self._open != field:
                    yield from self._close()
                    yield self._begin(field, block)
                kind = "thinking" if field == "reasoning_content" else "text"
                yield self._delta({"type": f"{kind}_delta", kind: text})
        for call in delta.get("tool_calls", []):
            yield from self._close()
            yield self._begin("tool_calls", _tool_use(call) | {"input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})

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


def _ending(choice: dict[str, Any]) -> dict[str, Any]:
    stop = choice.get("stop_reason")
    if choice["finish_reason"] == "stop" and isinstance(stop, str) and stop != "no_token":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": STOP_REASONS.get(choice["finish_reason"], "end_turn"), "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of tokens, those of the prompt that were cached apart."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
