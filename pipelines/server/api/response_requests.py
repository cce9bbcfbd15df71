"""Requests of OpenAI's /v1/responses, mapped to chat completions. Each field is honoured or rejected, or is one of the
listed fields that have no effect.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from pipelines.server.api.errors import SCHEMA_OF_TOOL, ApiError, bad_request
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import (
    MAX_TOKENS,
    Body,
    ChatRequest,
    Effort,
    Json,
    Name,
    Parts,
    Shape,
    SkippedObject,
)
from pipelines.server.api.skipping import NotUsed

NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    SCHEMA_OF_TOOL: "parameters",
}
"""Names that fields of chat requests have in this API."""
MAX_ITEMS = 4096  # of a conversation
Include: TypeAlias = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Additional parts of answers in OpenAI's API."""


class InputText(Shape):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Json | None = None
    """A cache hint. It has no effect: the prefix cache works without it."""


class InputRefusal(Shape):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class InputItem(Shape):
    """Fields that items of all types have. They do not affect the answer."""

    id: str | None = None
    status: str | None = None
    caller: Json | None = None
    internal_chat_message_metadata_passthrough: Json | None = None


class InputMessage(InputItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts[InputText | InputRefusal]
    phase: str | None = None


class InputCall(InputItem):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    namespace: str | None = None


class InputCustomCall(InputItem):
    """A call of a tool whose input is a text. It becomes a call with the argument `input`."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: str
    namespace: str | None = None

    @property
    def arguments(self) -> str:
        return json.dumps({"input": self.input}, ensure_ascii=False)


class InputResult(InputItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: str | Parts[InputText]
    name: Name | None = None
    namespace: str | None = None


class ReasoningText(Shape):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class InputReasoning(InputItem):
    type: Literal["reasoning"]
    content: Parts[ReasoningText] | None = None
    summary: Parts[ReasoningText] | None = None
    encrypted_content: Annotated[str | None, NotUsed()] = None
    """Reasoning of another server. This server returns reasoning as `content`."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or [])


class HostedItem(SkippedObject):
    """The use of a tool that OpenAI's servers run, or a state that only OpenAI's servers can read."""

    type: Literal[
        "web_search_call",
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "code_interpreter_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "tool_search_call",
        "tool_search_output",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "program",
        "program_output",
        "compaction",
        "compaction_summary",
        "context_compaction",
        "configuration_update",
    ]


class FunctionTool(Shape):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    defer_loading: Annotated[bool | None, NotUsed(unless=(False,))] = None
    allowed_callers: Annotated[list[str] | None, Field(max_length=16), NotUsed(unless=(["direct"],))] = None
    output_schema: Annotated[Json | None, NotUsed()] = None

    def tool(self) -> dict[str, Any]:
        """Return the tool in the format of chat requests."""
        return {
            "type": "function",
            "function": self.model_dump(include={"name", "description", "parameters", "strict"}),
        }


class HostedTool(SkippedObject):
    """A tool that OpenAI's servers run, or whose calls are no JSON."""

    type: Literal[
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


Tools: TypeAlias = Annotated[
    list[Annotated[FunctionTool | HostedTool, Field(discriminator="type")]], Field(max_length=128, fail_fast=True)
]


class InputTools(InputItem):
    """Further tools of the request."""

    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: Tools


Item: TypeAlias = Annotated[
    InputMessage | InputCall | InputCustomCall | InputResult | InputReasoning | InputTools | HostedItem,
    Field(union_mode="left_to_right"),  # an item fits at most one, and the other mode reads it as all of them
]


class TextFormat(Shape):
    type: Literal["text", "json_object"]


class SchemaFormat(Shape):
    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    json_schema: Json = Field(alias="schema")
    strict: bool | None = None


class TextOptions(Shape):
    format: TextFormat | SchemaFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, NotUsed()] = None


class ReasoningOptions(Shape):
    effort: Effort | None = None
    summary: Annotated[Literal["auto", "concise", "detailed", "none"] | None, NotUsed(unless=("none",))] = None
    """Reasoning is returned as it is written."""
    generate_summary: Annotated[Literal["auto", "concise", "detailed"] | None, NotUsed()] = None
    context: Annotated[Literal["auto", "current_turn", "all_turns"] | None, NotUsed(unless=("auto",))] = None
    mode: Annotated[Literal["standard", "pro"] | None, NotUsed(unless=("standard",))] = None


class StreamOptions(Shape):
    include_obfuscation: Annotated[bool | None, NotUsed(unless=(False,))] = None


class NamedFunctionTool(Shape):
    type: Literal["function"]
    name: Name


class CountInputRequest(Body):
    """A conversation as items. Its prompt tokens are counted."""

    path = "/v1/responses/input_tokens"
    names_model = True

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    previous_response_id: Name | None = None
    """The response that the input continues. Its instructions and tools are not inherited."""
    instructions: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, NotUsed(unless=("disabled",))] = None

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def after(self, items: list[Item]) -> Self:
        """Return the request with a conversation before its input."""
        return self.model_copy(update={"input": [*items, *self.items]})

    def chat(self) -> ChatRequest:
        """Return the request as a streamed chat request, of its own input alone. Raises ApiError (400) with this API's field names."""
        tools = [tool.tool() for tool in self._all_tools() if isinstance(tool, FunctionTool)]
        if self.tool_choice not in (None, "none", "auto") and not tools:
            raise bad_request("tool_choice needs tools: give tools, or leave it out", "tool_choice")
        body: dict[str, Any] = {
            "model": self.model,
            "n": 1,
            "messages": self._messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": self._format(),
            "tools": tools,
            "tool_choice": self.tool_choice if tools else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            **self._settings(),
        }
        if isinstance(self.tool_choice, NamedFunctionTool):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        with_names = {name: value for name, value in body.items() if value is not None}
        try:
            return check_request(ChatRequest, with_names)
        except ApiError as error:
            raise error.renamed(NAMES) from error

    def _settings(self) -> dict[str, Any]:
        return {}

    def _all_tools(self) -> list[FunctionTool | HostedTool]:
        further = [tool for item in self.items if isinstance(item, InputTools) for tool in item.tools]
        return [*(self.tools or []), *further]

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None:
            return None
        if isinstance(form, TextFormat):
            return form.model_dump()
        return {"type": "json_schema", "json_schema": form.model_dump(by_alias=True, exclude={"type"})}

    def _messages(self) -> list[dict[str, Any]]:
        """Return the conversation. Consecutive reasoning, text and call items of the assistant become one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.items:
            if isinstance(item, InputMessage) and item.role != "assistant":
                messages.append({"role": item.role, "content": _joined(item.content)})
            elif isinstance(item, InputTools | HostedItem) or (isinstance(item, InputReasoning) and not item.text):
                continue
            elif isinstance(item, InputResult):
                messages.append({"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id})
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                _add(messages[-1], item)
        return messages


class ResponseRequest(CountInputRequest):
    """A conversation to continue, as items."""

    path = "/v1/responses"

    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: Annotated[bool | None, NotUsed(unless=(False,))] = None
    """Whether the response is stored; None: if the server stores responses. Not used by a server that stores none."""
    background: bool | None = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority", "fast"] | None, NotUsed(unless=("auto", "default"))
    ] = None
    include: Annotated[
        Annotated[list[Include], Field(max_length=16, fail_fast=True)] | None,
        NotUsed(unless=([], ["reasoning.encrypted_content"])),
    ] = None
    """Reasoning is returned and accepted as plain text."""
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """A limit for tools that OpenAI's servers run. Here there are none."""
    top_logprobs: Annotated[Annotated[int, Field(ge=0, le=20)] | None, NotUsed(unless=(0,))] = None
    context_management: Annotated[Parts[Json] | None, NotUsed(unless=([],))] = None
    access_programs: Annotated[Json | None, NotUsed()] = None
    prompt_cache_options: Annotated[Json | None, NotUsed()] = None
    prompt_cache_retention: Annotated[Literal["in_memory", "24h"] | None, NotUsed()] = None
    metadata: (
        Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16, fail_fast=True)] | None
    ) = None
    client_metadata: (
        Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=16, fail_fast=True)] | None
    ) = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None

    def _settings(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "seed")
        return {"max_completion_tokens": self.max_output_tokens, **{name: getattr(self, name) for name in names}}


class NoQuery(BaseModel):
    """GET /v1/responses/{id} has no query parameters: neither `include` nor `stream`."""

    model_config = ConfigDict(extra="forbid")


class InputPage(BaseModel):
    """Query parameters of GET /v1/responses/{id}/input_items."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


def _add(message: dict[str, Any], item: Item) -> None:
    if isinstance(item, InputCall | InputCustomCall):
        function = {"name": item.name, "arguments": item.arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, InputReasoning):
        message["reasoning_content"] = message.get("reasoning_content", "") + item.text
    elif isinstance(item, InputMessage):
        message["content"] = message.get("content", "") + _joined(item.content)


def _joined(content: str | Sequence[InputText | InputRefusal]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
