"""Requests of Anthropic's API, /v1/messages, as chat requests, and its errors. Every field is honoured, or refused by its name."""

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from pipelines.api.errors import ApiError, bad_request
from pipelines.api.requests import MAX_TOKENS, ChatRequest, Name, Shape, StopText, check_request

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class CacheControl(Shape):
    """A hint that changes no answer: equal beginnings of prompts are found without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Shape):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


UserBlock: TypeAlias = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock: TypeAlias = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserTurn(Shape):
    role: Literal["user"]
    content: str | list[UserBlock]

    def messages(self) -> list[dict[str, Any]]:
        """Return the results of tools, then what the user says."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        said = [block for block in self.content if isinstance(block, TextBlock)]
        messages = [
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": "error: " * bool(block.is_error) + _text(block.content),
            }
            for block in results
        ]
        return messages + ([{"role": "user", "content": _text(said)}] if said or not results else [])


class AssistantTurn(Shape):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]

    def messages(self) -> list[dict[str, Any]]:
        """Return the answer with its reasoning and its calls."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        message: dict[str, Any] = {"role": "assistant"}
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        said = [block for block in self.content if isinstance(block, TextBlock)]
        if said or not calls:
            message["content"] = _text(said)
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
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def tool(self) -> dict[str, Any]:
        """Return the tool as chat requests have it."""
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
        """Return the choice as chat requests have it. Raises ApiError where a tool lacks its name."""
        if (self.type == "tool") != (self.name is not None):
            raise bad_request("tool_choice.name is for type=tool, which needs it: give both, or neither", "tool_choice")
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class NoThinking(Shape):
    type: Literal["disabled"]


class Metadata(Shape):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class MessagesRequest(Shape):
    """The body of POST /v1/messages."""

    model: Name
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    messages: Annotated[
        list[Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]], Field(min_length=1, max_length=4096)
    ]
    system: str | list[TextBlock] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: NoThinking | None = None
    """A budget of reasoning cannot be kept; disabled becomes the template's enable_thinking=false."""
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @model_validator(mode="after")
    def _check_last(self) -> "MessagesRequest":
        if isinstance(self.messages[-1], AssistantTurn):
            message = (
                "the last message is the assistant's, and beginnings of answers are not taken: end with the user's"
            )
            raise bad_request(message, "messages")
        return self

    def chat_request(self) -> ChatRequest:
        """Return the same as a chat request. Raises ApiError (400) for what that refuses."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "max_completion_tokens": self.max_tokens,
            "messages": system + [message for turn in self.messages for message in turn.messages()],
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "tools": [tool.tool() for tool in self.tools] if self.tools else None,
        }
        if self.tool_choice is not None:
            body["tool_choice"] = self.tool_choice.choice()
            body["parallel_tool_calls"] = False if self.tool_choice.disable_parallel_tool_use else None
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return check_request(ChatRequest, body)


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    return {"type": "error", "error": {"type": ERROR_TYPES.get(error.status, "api_error"), "message": error.message}}


def _text(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or [])
