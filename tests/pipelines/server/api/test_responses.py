"""/v1/responses against the types of OpenAI's client."""

from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pipelines.server.api.answers import AnswerInfo, ChoiceText, Event
from pipelines.server.api.errors import ApiError
from pipelines.server.api.parsing import check_request
from pipelines.server.api.response_requests import NAMES, ResponseRequest
from pipelines.server.api.responses import ResponseWriter
from tests.helpers.cases import each

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 3,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def request(**fields: Any) -> ResponseRequest:
    return check_request(ResponseRequest, {"model": "tiny", "input": "Hi", **fields})


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


class ChunksOf:
    """A chat writer that is given its chunks instead of deltas."""

    generation = SimpleNamespace(info=AnswerInfo("1", "chat.completion.chunk", 5, "tiny", 3, "fp"))

    def read(self, index: int, known: ChoiceText, rest: Any) -> list[Event]:
        return [Event(rest)]

    def usage_chunk(self) -> list[Event]:
        return []


def written(chunks: list[dict[str, Any]], **fields: Any) -> tuple[list[Any], Response]:
    """Return the events, validated strictly, and the response at the end."""
    writer = ResponseWriter(request(**fields), "1", ChunksOf())  # type: ignore[arg-type]
    made = [
        *writer.begin(),
        *(event for chunk in chunks for event in writer.read(0, ChoiceText(), chunk)),  # type: ignore[arg-type]
        *writer.end(),
    ]  # type: ignore[arg-type]
    events = [event.data for event in made]
    assert [event.name for event in made] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
    return events, Response.model_validate(events[-1]["response"])


def test_a_text_is_a_message() -> None:
    chunks = [
        chunk(role="assistant", content=""),
        chunk(content="Hel"),
        chunk(content="lo"),
        chunk("stop"),
        {"choices": [], "usage": USAGE},
    ]
    events, response = written(chunks, temperature=0.5, instructions="Be kind.")
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert (response.output_text, response.status, response.instructions) == ("Hello", "completed", "Be kind.")
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 1
    assert response.usage.output_tokens_details.reasoning_tokens == 1


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chunks = [chunk(reasoning_content="Let me"), chunk(content="So"), chunk(tool_calls=[call]), chunk("tool_calls")]
    events, response = written(chunks, tools=[TOOL])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert [item.status for item in response.output] == ["completed"] * 3  # type: ignore[union-attr]
    reasoning, _, called = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me"}]
    assert (called["call_id"], called["name"], called["arguments"]) == ("c1", "add", '{"a": 1}')


def test_an_answer_that_was_cut_is_incomplete() -> None:
    events, response = written([chunk(content="Hel"), chunk("length")])
    assert events[-1]["type"] == "response.incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_the_output_is_taken_back_as_input() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    _, response = written([chunk(reasoning_content="Hm"), chunk(content="So"), chunk(tool_calls=[call]), chunk("stop")])
    items = [item.model_dump(exclude_none=True) for item in response.output]
    result = {"type": "function_call_output", "call_id": "c1", "output": "5"}
    question = {"role": "user", "content": [{"type": "input_text", "text": "1 + 4?"}]}
    unread = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}
    chat = request(input=[question, unread, *items, result, unread], tools=[TOOL], instructions="Add.").chat()
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert chat.conversation() == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 4?"},
        {"role": "assistant", "reasoning_content": "Hm", "content": "So", "tool_calls": [called]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]


def test_fields_become_the_chats() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "null"}, "strict": True}
    chat = request(
        max_output_tokens=7,
        temperature=0,
        seed=4,
        reasoning={"effort": "low"},
        text={"format": form},
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        store=False,
        include=["reasoning.encrypted_content"],
    ).chat()
    assert (chat.max_completion_tokens, chat.temperature, chat.seed, chat.reasoning_effort) == (7, 0, 4, "low")
    assert chat.response_format is not None
    assert chat.response_format.model_dump(by_alias=True)["json_schema"]["schema"] == {"type": "null"}
    assert chat.tools is not None
    assert chat.tools[0].function.name == "add"
    assert chat.parallel_tool_calls is False
    assert chat.stream


@each(
    ("fields", "param", "message"),
    [
        (
            {"conversation": "conv_1"},
            "conversation",
            "conversation is not supported: there are no conversation objects",
        ),
        ({"prompt": {"id": "p"}}, "prompt", "prompt is not supported"),
        ({"input": []}, "input", "at least 1 item"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "give 'function'"),
    ],
)
def test_unsupported_fields_are_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        request(**fields).chat()
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in caught.value.message


def test_errors_of_the_chat_have_the_names_of_responses() -> None:
    error = ApiError(400, "max_completion_tokens=9 is too much", param="max_completion_tokens").renamed(NAMES)
    assert (error.param, error.message) == ("max_output_tokens", "max_output_tokens=9 is too much")
    assert ApiError(400, "x", param="messages[0].content").renamed(NAMES).param == "input"
    assert ApiError(400, "x", param="temperature").renamed(NAMES).param == "temperature"


def test_a_response_that_fails_says_so() -> None:
    writer = ResponseWriter(request(), "1", ChunksOf())  # type: ignore[arg-type]
    begun = [*writer.begin(), *writer.read(0, ChoiceText(), chunk(content="Hel"))]  # type: ignore[arg-type]
    last = writer.failed(ApiError(504, "the request took longer than it had", "timeout_error", code="deadline"))
    assert (last.name, last.data["sequence_number"]) == ("response.failed", len(begun))
    failed = EVENTS.validate_python(last.data).response
    assert (failed.status, failed.error.message) == ("failed", "the request took longer than it had")
    assert failed.output_text == "Hel"
