"""OpenAI's /v1/responses, mapped to chat completions.

Requests become chat requests. The chunks of the answer become events and a response. The server stores
nothing: each request contains the whole conversation.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from pipelines.server.api.answers import ChoiceText, Event
from pipelines.server.api.errors import SCHEMA_OF_TOOL, ApiError, bad_request
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import MAX_TOKENS, Body, ChatRequest, Json, Name, Parts, Shape
from pipelines.server.api.writers import ChatWriter

NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    SCHEMA_OF_TOOL: "parameters",
}
"""Names that fields of chat requests have in this API."""


class InputText(Shape):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Shape):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts[InputText]
    id: str | None = None
    status: str | None = None


class InputCall(Shape):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: str | None = None
    status: str | None = None


class InputResult(Shape):
    type: Literal["function_call_output"]
    call_id: Name
    output: str | Parts[InputText]
    id: str | None = None
    status: str | None = None


class ReasoningText(Shape):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Shape):
    type: Literal["reasoning"]
    content: Parts[ReasoningText] | None = None
    summary: Parts[ReasoningText] | None = None
    id: str | None = None
    status: str | None = None


Item: TypeAlias = InputMessage | InputCall | InputResult | InputReasoning


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


class ReasoningOptions(Shape):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class FunctionTool(Shape):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedFunctionTool(Shape):
    type: Literal["function"]
    name: Name


class ResponseRequest(Body):
    """A conversation to continue, as items."""

    path = "/v1/responses"

    model: Name
    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = None
    """Reasoning is returned and accepted as plain text."""
    metadata: (
        Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16, fail_fast=True)] | None
    ) = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None

    def chat(self) -> ChatRequest:
        """Return the request as a streamed chat request. Raises ApiError (400) with this API's field names."""
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise bad_request("tool_choice needs tools: give tools, or leave it out", "tool_choice")
        body: dict[str, Any] = {
            "model": self.model,
            "n": 1,
            "messages": self._messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": self._format(),
            "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or []],
        }
        for name in ("temperature", "top_p", "seed", "parallel_tool_calls"):
            body[name] = getattr(self, name)
        body["tool_choice"] = self.tool_choice if self.tools else None
        if isinstance(self.tool_choice, NamedFunctionTool):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        with_names = {name: value for name, value in body.items() if value is not None}
        try:
            return check_request(ChatRequest, with_names)
        except ApiError as error:
            raise error.renamed(NAMES) from error

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
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if isinstance(item, InputMessage) and item.role != "assistant":
                messages.append({"role": item.role, "content": _joined(item.content)})
            elif isinstance(item, InputResult):
                messages.append({"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id})
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                _add(messages[-1], item)
        return messages


def _add(message: dict[str, Any], item: Item) -> None:
    if isinstance(item, InputCall):
        function = {"name": item.name, "arguments": item.arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, InputReasoning):
        text = "".join(part.text for part in item.content or item.summary or [])
        message["reasoning_content"] = message.get("reasoning_content", "") + text
    elif isinstance(item, InputMessage):
        message["content"] = message.get("content", "") + _joined(item.content)


def _joined(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class ResponseWriter:
    """Writes a chat answer as a response: chunks become events."""

    def __init__(self, request: ResponseRequest, id: str, chat: ChatWriter) -> None:
        """`id`: id of the request. The ids of the response and of its items derive from it."""
        self._request = request
        self._id = id
        self._chat = chat
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None

    def body(self, choices: list[ChoiceText]) -> dict[str, Any]:
        self.begin()
        self.read(0, ChoiceText(), choices[0])
        self.end()
        return self._response(self._status)

    def begin(self) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
        return _named([self._event(kind, response=self._response("in_progress")) for kind in kinds])

    def read(self, index: int, received: ChoiceText, remaining: ChoiceText) -> list[Event]:
        return _named([event for chunk in self._chat.read(index, received, remaining) for event in self._read(chunk)])

    def end(self) -> list[Event]:
        for chunk in self._chat.usage_chunk():
            self._read(chunk)
        status = self._status
        return _named([*self._close(status), self._event(f"response.{status}", response=self._response(status))])

    def failed(self, error: ApiError) -> Event:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"  # error codes that clients recognize
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return _named([self._event("response.failed", response=response)])[0]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _read(self, chunk: Event) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for choice in chunk.data["choices"]:
            events += self._piece(choice["delta"])
            self._finish_reason = choice["finish_reason"] or self._finish_reason
        if chunk.data.get("usage"):
            self._usage = chunk.data["usage"]
        return events

    def _response(self, status: str) -> dict[str, Any]:
        info = self._chat.generation.info
        request = self._request.model_dump(by_alias=True)
        names = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user")
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": info.created,
            "model": info.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [dict(item) for item in self._output] if status != "in_progress" else [],
            "parallel_tool_calls": request["parallel_tool_calls"] is not False,
            "previous_response_id": None,
            "reasoning": request["reasoning"] or {"effort": None},
            "store": False,
            "text": {"format": (request["text"] or {}).get("format") or {"type": "text"}},
            "tool_choice": request["tool_choice"] or "auto",
            "tools": request["tools"] or [],
            "truncation": "disabled",
            "usage": _usage(self._usage),
            "seed": info.seed,
            "system_fingerprint": info.system_fingerprint,
            **{name: request[name] for name in names},
        }

    def _event(self, type: str, **more: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": type, "sequence_number": self._num_events - 1, **more}

    def _piece(self, piece: dict[str, Any]) -> list[dict[str, Any]]:
        events = []
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if text := piece.get(name):
                if not self._is_open or self._output[-1]["type"] != kind:
                    events += self._close("completed") + self._open(kind)
                self._output[-1]["content"][0]["text"] += text
                part = "output_text" if kind == "message" else "reasoning_text"
                more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
                events.append(self._event(f"response.{part}.delta", **self._at(), delta=text, **more))
        for call in piece.get("tool_calls", []):
            events += self._call_piece(call)
        return events

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _open(self, kind: str) -> list[dict[str, Any]]:
        index, self._is_open = len(self._output), True
        if kind == "message":
            head: dict[str, Any] = {"id": f"msg_{self._id}_{index}", "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            head, part = {"id": f"rs_{self._id}_{index}", "summary": []}, {"type": "reasoning_text", "text": ""}
        item = {"type": kind, **head, "status": "in_progress", "content": []}
        self._output.append({**item, "content": [part]})
        added = self._event("response.output_item.added", output_index=index, item=item)
        return [added, self._event("response.content_part.added", **self._at(), part=dict(part))]

    def _close(self, status: str) -> list[dict[str, Any]]:
        """End the open item."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **self._call_at(), **fields)]
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                self._event(f"response.{part['type']}.done", **self._at(), text=part["text"], **more),
                self._event("response.content_part.done", **self._at(), part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)]

    def _call_piece(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Add the beginning of a call, or a piece of its arguments."""
        events, text = list[dict[str, Any]](), call["function"]["arguments"]
        if "id" in call:
            events += self._close("completed")
            index, self._is_open = len(self._output), True
            item = {"type": "function_call", "id": f"fc_{self._id}_{index}", "call_id": call["id"]}
            item |= {"name": call["function"]["name"], "arguments": "", "status": "in_progress"}
            self._output.append(item)
            events.append(self._event("response.output_item.added", output_index=index, item=dict(item)))
        if text:
            self._output[-1]["arguments"] += text
            events.append(self._event("response.function_call_arguments.delta", **self._call_at(), delta=text))
        return events

    def _call_at(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}


def _named(events: list[dict[str, Any]]) -> list[Event]:
    return [Event(event, name=event["type"]) for event in events]


def _usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage["prompt_tokens"],
        # Writing the prefix cache costs nothing extra.
        "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
