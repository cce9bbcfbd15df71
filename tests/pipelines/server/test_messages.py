"""Anthropic's API: its client's requests become chat requests, and answers have its shapes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import pytest

from conf.serving import ServeConfig
from pipelines.replicas.engine_process.frames import Delta, Done
from pipelines.server.api.answers import ChoiceText, Event
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import ApiError
from pipelines.server.api.generation import Generation, RequestContext
from pipelines.server.api.message_requests import MessagesRequest
from pipelines.server.api.messages import MessageWriter
from pipelines.server.api.parsing import parse_request
from pipelines.server.api.requests import ChatRequest
from pipelines.server.api.writers import ChatWriter
from pipelines.server.generation_routes import message
from pipelines.server.stream import written as sent
from tests.helpers.cases import each
from tests.helpers.chat_styles import ARGUMENTS, CALLS, WEATHER, chat_of
from tests.helpers.fake_engine import READY
from tests.helpers.local_http import exchange_of, parsed
from tests.helpers.serving import serving, tiny_run
from tests.helpers.waiting import LIMIT_S

SERVED = msgspec.structs.replace(READY, context_length=4096, num_cache_tokens=4096)
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": "weather", "input_schema": WEATHER}, {"name": "clock", "input_schema": {"type": "object"}}]
CALL = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "北京"}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
Answering = Callable[[MessagesRequest], Any]


def written(
    chat: Chat, body: MessagesRequest, text: str, failure: ApiError | None = None
) -> dict[str, Any] | list[Event]:
    """Return the answer to a request. The engine's text comes in tokens of seven letters; 16 tokens of the prompt were
    cached."""
    request = body.chat_request()
    prompt = chat.prompt(request)
    generation = Generation(
        request, [prompt.token_ids], SERVED, RequestContext("msg-1", "m"), chat.tokenizer, prompt.settings
    )
    generation.dones = {0: Done(1, len(prompt.token_ids), 16, 0, 0.0, 0.0, 0.0)}
    writer = MessageWriter(ChatWriter(generation, request, prompt.reader))
    deltas = [Delta(1, 0, text[i : i + 7], [5], []) for i in range(0, len(text), 7)]
    deltas[-1].finish_reason = "stop"
    taken = [generation.take(0, delta) for delta in deltas]
    if not body.stream:
        if failure:
            raise failure
        total = ChoiceText()
        for _, _, rest in taken:
            total.add(rest)
        return writer.body([total])
    events = [*writer.begin(), *(event for part in taken for event in writer.read(*part))]
    return [*events, writer.failed(failure)] if failure else [*events, *writer.end()]


def client_of(answering: Answering) -> anthropic.Anthropic:
    """Return the client of a server that answers with `answering`."""

    def answered(body: MessagesRequest) -> httpx.Response:
        answer = answering(body)
        if isinstance(answer, dict):
            return httpx.Response(200, json=answer)
        return httpx.Response(200, content=sent(answer), headers={"content-type": "text/event-stream"})

    def handle(request: httpx.Request) -> httpx.Response:
        try:
            return answered(parse_request(MessagesRequest, request.content))
        except ApiError as error:
            return httpx.Response(error.status, json=error.body("/v1/messages"))

    http = httpx.Client(transport=httpx.MockTransport(handle))
    return anthropic.Anthropic(api_key="k", base_url="http://server", http_client=http, max_retries=0)


def asked_chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 50, "messages": MESSAGES, **fields}
    return parse_request(MessagesRequest, json.dumps(body).encode()).chat_request()


def ask(client: anthropic.Anthropic, streams: bool, **fields: Any) -> Any:
    body: Any = {"model": "m", "max_tokens": 50, "messages": MESSAGES, **fields}
    if not streams:
        return client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        return stream.get_final_message()


@each("streams", [False, True])
def test_reasoning_text_and_calls_are_blocks(streams: bool, tmp_path: Path) -> None:
    chat, _ = chat_of(tmp_path, "chatml")
    text = f"<think>hm hm</think>\n\nI look.\n{CALLS['chatml']}"
    client = client_of(lambda body: written(chat, body, text))
    message = ask(client, streams, tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (message.content[0].thinking, message.content[1].text) == ("hm hm", "I look.")
    assert [(block.name, block.input) for block in message.content[2:]] == [
        ("weather", json.loads(ARGUMENTS)),
        ("clock", {}),
    ]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("tool_use", None, "m")
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (16, -(-len(text) // 7))
    assert 0 < usage.input_tokens + 16 == len(chat.prompt(asked_chat(tools=TOOLS)).token_ids)


def test_requests_become_chat_requests(tmp_path: Path) -> None:
    chat, tokenizer = chat_of(tmp_path, "chatml")
    asked: list[ChatRequest] = []
    client = client_of(lambda body: asked.append(body.chat_request()) or written(chat, body, "Fine"))  # type: ignore[func-returns-value]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sun"}]},
        {"type": "tool_result", "tool_use_id": "b", "content": "none", "is_error": True},
        {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
    ]
    turns = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                CALL,
            ],
        },
        {"role": "user", "content": results},
    ]
    fields = {"temperature": 0.5, "top_k": 3, "stop_sequences": ["END"], "tools": TOOLS, "metadata": {"user_id": "u"}}
    message = ask(client, False, messages=turns, system=[{"type": "text", "text": "be brief"}], **fields)
    assert (message.content[0].text, message.stop_reason) == ("Fine", "end_turn")
    (request,) = asked
    assert (request.max_completion_tokens, request.temperature, request.top_k, request.stop) == (50, 0.5, 3, ["END"])
    function = {"name": "weather", "arguments": '{"city": "北京"}'}
    assert request.conversation() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "tool", "tool_call_id": "b", "content": "error: none"},
        {"role": "user", "content": "and?"},
    ]
    check_settings()


def check_settings() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "The"}]}]
    assert (asked_chat(messages=begun).continue_final_message, asked_chat().continue_final_message) == (True, None)
    request = asked_chat(tools=TOOLS, tool_choice={"type": "tool", "name": "clock", "disable_parallel_tool_use": True})
    assert request.tool_choice.function.name == "clock"  # type: ignore[union-attr]
    assert request.parallel_tool_calls is False
    request = asked_chat(tools=TOOLS, tool_choice={"type": "any"}, thinking={"type": "disabled"})
    assert (request.tool_choice, request.reasoning_effort) == ("required", "none")
    schema = {"type": "object", "properties": {}}
    form = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    request = asked_chat(thinking={"type": "enabled", "budget_tokens": 1024}, output_config=form)
    assert (request.thinking_token_budget, request.reasoning_effort) == (1024, "low")
    assert request.response_format.json_schema.json_schema == schema  # type: ignore[union-attr]
    request = asked_chat(thinking={"type": "adaptive"}, tools=[{"type": "bash_20250124", "name": "bash"}])
    assert (request.thinking_token_budget, request.reasoning_effort, request.tools) == (None, "high", [])


@each(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is not allowed"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": ""}]}, "end with the user's"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "a"}, CALL]}]},
            "end with the user's",
        ),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name is for type=tool"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens is for type=enabled"),
        (
            {"extra_body": {"output_format": FORM, "output_config": {"format": FORM}}},
            "output_format and output_config.format are both given",
        ),
        (
            {"tool_choice": {"type": "any"}, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tool_choice needs tools",
        ),
        ({"extra_body": {"container": "c"}}, "container is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages",
        ),
    ],
)
def test_refusals_have_the_shape_of_anthropics_errors(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as raised:
        ask(client_of(lambda body: written(chat_of(tmp_path, "chatml")[0], body, "Fine")), False, **fields)
    assert raised.value.body["type"] == "error"  # type: ignore[index,call-overload]
    assert raised.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]


@each("streams", [False, True])
def test_a_failure_on_the_way_is_told(streams: bool, tmp_path: Path) -> None:
    chat, _ = chat_of(tmp_path, "chatml")
    failure = ApiError(503, "the engine has ended", "server_error")
    with pytest.raises(anthropic.APIStatusError, match="the engine has ended"):
        ask(client_of(lambda body: written(chat, body, "Fi", failure)), streams)


@pytest.mark.long
def test_the_engine_stops_at_sequences_and_at_the_length() -> None:
    async def asked(**fields: Any) -> tuple[dict[str, Any], list[Event]]:
        async with serving() as engine:
            chat = Chat.open(tiny_run().model, ServeConfig())
            both: list[Any] = []
            for streams in (False, True):
                body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "stream": streams, **fields}
                exchange = exchange_of(engine)
                result = await message(parse_request(MessagesRequest, json.dumps(body).encode()), exchange, chat)
                if isinstance(result, dict):
                    both.append(result)
                else:
                    both.append(parsed(b"".join([part async for part in result.events]).decode()))
                exchange.end()
            chat.close()
            return both[0], both[1]

    body, events = asyncio.run(asyncio.wait_for(asked(max_tokens=3), LIMIT_S))
    assert (body["stop_reason"], body["usage"]["output_tokens"]) == ("max_tokens", 3)
    text = "".join(event.data["delta"].get("text", "") for event in events if event.name == "content_block_delta")
    assert text == body["content"][0]["text"]
    assert [event.name for event in events][:2] == ["message_start", "content_block_start"]
    assert [event.name for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2].data["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2].data["usage"]["output_tokens"] == 3
    stop = text.split()[0]
    body, _ = asyncio.run(asyncio.wait_for(asked(max_tokens=30, stop_sequences=[stop]), LIMIT_S))
    assert (body["stop_reason"], body["stop_sequence"], stop in str(body["content"])) == ("stop_sequence", stop, False)
