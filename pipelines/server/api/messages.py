"""Anthropic's /v1/messages, mapped to chat completions. Each field is honoured or rejected."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator
from pydantic_core import from_json

from pipelines.server.api.answers import ChoiceText, Event
from pipelines.server.api.errors import ANTHROPIC, SCHEMA_OF_TOOL, ApiError, bad_request
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import (
    MAX_TOKENS,
    Body,
    CacheControl,
    ChatRequest,
    Json,
    Name,
    Parts,
    Shape,
    StopText,
    TopP,
)
from pipelines.server.api.writers import ChatWriter

NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", SCHEMA_OF_TOOL: "input_schema"}
"""Names that fields of chat requests have in Anthropic's API."""
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
BLOCKS: dict[str, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning_content": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Initial content of a block, by the field of the chat delta that opens the block."""


class Block(Shape):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Json


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Parts[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


UserBlock: TypeAlias = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock: TypeAlias = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class SystemTurn(Shape):
    """System instructions in the middle of a conversation."""

    role: Literal["system"]
    content: str | Parts[TextBlock]

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": _text(self.content)}]


class UserTurn(Shape):
    role: Literal["user"]
    content: str | Parts[UserBlock]

    def messages(self) -> list[dict[str, Any]]:
        """Return the tool results, then the user's text."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        messages = [
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": "error: " * bool(block.is_error) + _text(block.content),
            }
            for block in results
        ]
        return messages + ([{"role": "user", "content": _text(texts)}] if texts or not results else [])


class AssistantTurn(Shape):
    role: Literal["assistant"]
    content: str | Parts[AssistantBlock]

    def messages(self) -> list[dict[str, Any]]:
        """Return the answer with its reasoning and its tool calls."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        message: dict[str, Any] = {"role": "assistant"}
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        if texts or not calls:
            message["content"] = _text(texts)
        if thoughts := [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            functions = [{"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)} for call in calls]
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
        return [message]


class CustomTool(Block):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Json
    strict: bool | None = None

    def tool(self) -> dict[str, Any]:
        """Return the tool in the format of chat requests."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": function}


class ToolChoice(Shape):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> str | dict[str, Any]:
        """Return the choice in the format of chat requests. Raises ApiError if `name` is missing or superfluous."""
        if (self.type == "tool") != (self.name is not None):
            raise bad_request("tool_choice.name is for type=tool, which needs it: give both, or neither", "tool_choice")
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class NoThinking(Shape):
    type: Literal["disabled"]


class Metadata(Shape):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class CountTokensRequest(Body):
    """A conversation in Anthropic's format. Its prompt tokens are counted."""

    path = f"{ANTHROPIC}/count_tokens"

    model: Name
    messages: Annotated[
        list[Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]],
        Field(min_length=1, max_length=4096, fail_fast=True),
    ]
    system: str | Parts[TextBlock] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: NoThinking | None = None
    """A reasoning budget cannot be enforced. `disabled` becomes the template argument enable_thinking=false."""

    @model_validator(mode="after")
    def _check_last(self) -> "CountTokensRequest":
        if isinstance(self.messages[-1], AssistantTurn):
            message = (
                "the last message is the assistant's, and beginnings of answers are not taken: end with the user's"
            )
            raise bad_request(message, "messages")
        return self

    def chat_request(self) -> ChatRequest:
        """Return the equivalent chat request. Raises ApiError (400) if it is invalid."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "n": 1,
            "messages": system + [message for turn in self.messages for message in turn.messages()],
            "tools": [tool.tool() for tool in self.tools] if self.tools else None,
            **self._settings(),
        }
        if self.tool_choice is not None:
            body["tool_choice"] = self.tool_choice.choice()
            body["parallel_tool_calls"] = False if self.tool_choice.disable_parallel_tool_use else None
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        try:
            return check_request(ChatRequest, body)
        except ApiError as error:
            raise error.renamed(NAMES) from error

    def _settings(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountTokensRequest):
    """A conversation in Anthropic's format. The next message is generated."""

    path = ANTHROPIC

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stop_sequences: Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def _settings(self) -> dict[str, Any]:
        names = {"max_tokens": "max_completion_tokens", "stop_sequences": "stop"}
        fields = ("max_tokens", "stop_sequences", "temperature", "top_p", "top_k")
        stream = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return {names.get(name, name): getattr(self, name) for name in fields} | stream


def _text(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or [])


class MessageWriter:
    """Writes a chat answer as an Anthropic message: chunks become content blocks."""

    def __init__(self, chat: ChatWriter) -> None:
        self._chat = chat
        self._num_blocks = 0
        self._open: str | None = None
        """The chat delta's field that opened the current block; None: no block is open."""
        self._ending: dict[str, Any] = {}

    def body(self, choices: list[ChoiceText]) -> dict[str, Any]:
        chat = self._chat.body(choices)
        (choice,) = chat["choices"]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        if thought := message.get("reasoning_content"):
            content.append(BLOCKS["reasoning_content"] | {"thinking": thought})
        if text := message["content"]:
            content.append(BLOCKS["content"] | {"text": text})
        content += [
            _tool_use(call) | {"input": _input(call["function"]["arguments"])} for call in message.get("tool_calls", [])
        ]
        return self._message(content) | _ending(choice) | {"usage": _usage(chat["usage"])}

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
