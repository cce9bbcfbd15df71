"""Answers of OpenAI's /v1/responses: the chunks of a chat answer become events and a response."""

from typing import Any

from pipelines.server.api.answers import ChoiceText, Event
from pipelines.server.api.errors import ApiError
from pipelines.server.api.generation import Generation
from pipelines.server.api.response_requests import ResponseRequest
from pipelines.server.api.writers import ChatWriter

ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Codes of failed responses that clients recognize, by status."""


class ResponseWriter:
    """Writes a chat answer as a response: chunks become events."""

    def __init__(self, request: ResponseRequest, id: str, chat: ChatWriter, is_stored: bool = False) -> None:
        """`id`: the ids of the response and of its items derive from it. `is_stored`: whether it will be stored."""
        self.request = request
        self.is_stored = is_stored
        self.ended: dict[str, Any] = {}
        """The complete response, after `body` or `end`."""
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
        return self.ended

    @property
    def generation(self) -> Generation:
        return self._chat.generation

    def begin(self) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
        return _named([self._event(kind, response=self.response("in_progress")) for kind in kinds])

    def read(self, index: int, received: ChoiceText, remaining: ChoiceText) -> list[Event]:
        return _named([event for chunk in self._chat.read(index, received, remaining) for event in self._read(chunk)])

    def end(self) -> list[Event]:
        for chunk in self._chat.usage_chunk():
            self._read(chunk)
        status = self._status
        events = self._close(status)
        self.ended = self.response(status)
        return _named([*events, self._event(f"response.{status}", response=self.ended)])

    def failed(self, error: ApiError) -> Event:
        code = ERROR_CODES.get(error.status, "server_error")
        response = self.response("failed") | {"error": {"code": code, "message": error.message}}
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

    def response(self, status: str) -> dict[str, Any]:
        """Return the response object with this status."""
        info = self._chat.generation.info
        request = self.request.model_dump(by_alias=True, exclude={"input"})
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
            "background": bool(request["background"]),
            "parallel_tool_calls": request["parallel_tool_calls"] is not False,
            "previous_response_id": request["previous_response_id"],
            "reasoning": request["reasoning"] or {"effort": None},
            "store": self.is_stored,
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
