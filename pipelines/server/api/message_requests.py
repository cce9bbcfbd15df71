"""Requests of Anthropic's /v1/messages, mapped to chat completions. Each field is honoured or rejected, or is one of the
listed fields that have no effect.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from pipelines.server.api.errors import ANTHROPIC, SCHEMA_OF_TOOL, ApiError, bad_request
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import (
    MAX_TOKENS,
    Body,
    CacheControl,
    ChatRequest,
    Effort,
    Json,
    Name,
    NumTokens,
    Parts,
    Shape,
    SkippedObject,
    StopText,
    TopP,
)
from pipelines.server.api.skipping import NotUsed

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "thinking_token_budget": "thinking",
    SCHEMA_OF_TOOL: "input_schema",
}
"""Names that fields of chat requests have in Anthropic's API."""
HOSTED_TOOLS = (
    *("bash", "text_editor", "computer", "computer_toolset", "browser_toolset", "memory", "advisor"),
    *("web_search", "web_fetch", "code_execution", "tool_search_tool_bm25", "tool_search_tool_regex", "mcp_toolset"),
)
"""Tools whose schema only Anthropic's models know. The type of a tool may end in a date."""
HOSTED_TOOL = rf"^({'|'.join(HOSTED_TOOLS)})(_20[0-9]{{6}})?$"
DEFAULT_EFFORT = "high"  # of Anthropic's API


class Block(Shape):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[Parts[Json] | None, NotUsed(unless=([],))] = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Json
    caller: Annotated[Json | None, NotUsed(unless=({"type": "direct"},))] = None


class ToolReference(SkippedObject):
    """The name of a tool that a search has loaded. Here all tools are loaded."""

    type: Literal["tool_reference"]


ResultBlock: TypeAlias = Annotated[TextBlock | ToolReference, Field(discriminator="type")]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Parts[ResultBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class HostedBlock(SkippedObject):
    """Encrypted reasoning, or the use of a tool that Anthropic's servers run."""

    type: Literal[
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "fallback",
    ]


UserBlock: TypeAlias = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock: TypeAlias = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | HostedBlock, Field(discriminator="type")
]


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
    eager_input_streaming: bool | None = None
    """The arguments of calls are streamed in any case."""
    defer_loading: Annotated[bool | None, NotUsed(unless=(False,))] = None
    allowed_callers: Annotated[list[str] | None, Field(max_length=16), NotUsed(unless=(["direct"],))] = None
    input_examples: Annotated[Parts[Json] | None, NotUsed(unless=([],))] = None

    def tool(self) -> dict[str, Any]:
        """Return the tool in the format of chat requests."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": function}


class HostedTool(SkippedObject):
    type: Annotated[str, Field(pattern=HOSTED_TOOL)]


def _kind_of_tool(tool: object) -> str:
    """Return the tag of a tool's class."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "own" if kind in (None, "custom") else "hosted"


AnyTool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag("own")] | Annotated[HostedTool, Tag("hosted")], Discriminator(_kind_of_tool)
]


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


class Thinking(Shape):
    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: NumTokens | None = None
    """The maximum number of reasoning tokens. 0 with type=adaptive means no maximum."""
    display: Annotated[str | None, Field(max_length=32), NotUsed(unless=("summarized",))] = None
    """Reasoning is always returned."""

    @model_validator(mode="after")
    def _check_budget(self) -> "Thinking":
        if self.type == "disabled" and self.budget_tokens:
            raise bad_request("thinking.budget_tokens is for type=enabled: give this type, or leave it out", "thinking")
        return self


class JsonFormat(Shape):
    type: Literal["json_schema"]
    json_schema: Json = Field(alias="schema")


class OutputConfig(Shape):
    effort: Effort | None = None
    format: JsonFormat | None = None
    task_budget: Annotated[Json | None, NotUsed()] = None


class ContextEdit(SkippedObject):
    """A change of old messages by the server. Here the chat template decides which reasoning it keeps."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112"]


class ContextManagement(Shape):
    edits: Annotated[list[ContextEdit], Field(max_length=16, fail_fast=True)] | None = None


class Metadata(Shape):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class CountTokensRequest(Body):
    """A conversation in Anthropic's format. Its prompt tokens are counted."""

    path = f"{ANTHROPIC}/count_tokens"
    names_model = True

    messages: Annotated[
        list[Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]],
        Field(min_length=1, max_length=4096, fail_fast=True),
    ]
    system: str | Parts[TextBlock] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """The former name of output_config.format."""
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    diagnostics: Annotated[Json | None, NotUsed()] = None
    mcp_servers: Annotated[Parts[Json] | None, NotUsed(unless=([],))] = None
    fallbacks: Annotated[Json | Parts[Json] | None, NotUsed(unless=([],))] = None
    inference_geo: Annotated[str | None, Field(max_length=64), NotUsed()] = None
    speed: Annotated[Literal["standard", "fast"] | None, NotUsed(unless=("standard",))] = None

    @model_validator(mode="after")
    def _check_last(self) -> "CountTokensRequest":
        if isinstance(last := self.messages[-1], AssistantTurn):
            (message,) = last.messages()
            if not message.get("content") or "tool_calls" in message:
                problem = "the last message is the assistant's and has calls or no text, so no answer can continue it"
                raise bad_request(f"{problem}: end with the user's message", "messages")
        return self

    def chat_request(self) -> ChatRequest:
        """Return the equivalent chat request. Raises ApiError (400) if it is invalid."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "n": 1,
            "messages": system + [message for turn in self.messages for message in turn.messages()],
            "tools": self.tools and [tool.tool() for tool in self.tools if isinstance(tool, CustomTool)],
            "continue_final_message": isinstance(self.messages[-1], AssistantTurn) or None,
            "response_format": self._format(),
            **self._reasoning(),
            **self._settings(),
        }
        if self.tool_choice is not None:
            body["tool_choice"] = self.tool_choice.choice()
            body["parallel_tool_calls"] = False if self.tool_choice.disable_parallel_tool_use else None
        try:
            return check_request(ChatRequest, body)
        except ApiError as error:
            raise error.renamed(NAMES) from error

    def _format(self) -> dict[str, Any] | None:
        form = self.output_config and self.output_config.format
        if form and self.output_format:
            raise bad_request("output_format and output_config.format are both given: give one", "output_format")
        if (form := form or self.output_format) is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.json_schema}}

    def _reasoning(self) -> dict[str, Any]:
        """Return the reasoning effort and budget as fields of a chat request."""
        effort = self.output_config and self.output_config.effort
        if self.thinking is None:
            return {"reasoning_effort": effort}
        if self.thinking.type == "disabled":
            return {"reasoning_effort": "none"}
        budget = self.thinking.budget_tokens
        is_unlimited = self.thinking.type == "adaptive" and budget == 0
        return {
            "reasoning_effort": effort or DEFAULT_EFFORT,
            "thinking_token_budget": None if is_unlimited else budget,
        }

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


def _text(content: str | Sequence[Shape] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or [] if isinstance(block, TextBlock))
