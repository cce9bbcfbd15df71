"""Anthropic's client with the served model: sync, async, streams, tools and errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.helpers.cases import each
from tests.helpers.clients import QUESTION, TOOL_TEMPLATE, Expected, Weather
from tests.helpers.server import served

pytestmark = pytest.mark.long
ASKED: Any = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": QUESTION}]}
CITIES = [{"city": "Bern"}, {"city": "Rome"}]


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "template.jinja").write_text(TOOL_TEMPLATE)
    settings = (f"serve.chat_template={folder / 'template.jinja'}", "serve.response_template=hermes", "decode.seed=5")
    with served(folder / "run", *settings) as (_, url):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def text_of(message: Any) -> str:
    assert [block.type for block in message.content] == ["text"]
    return str(message.content[0].text)


def test_answers_are_predicts(client: anthropic.Anthropic, expected: Expected) -> None:
    text = expected.answer(QUESTION, max_new_tokens=12, temperature=0.0)
    answer = client.messages.create(**ASKED, temperature=0)
    assert text_of(answer) == text
    assert answer.usage.output_tokens > 0
    with client.messages.stream(**ASKED, temperature=0) as stream:
        assert "".join(stream.text_stream) == text
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (answer.stop_reason, answer.usage.output_tokens)


def test_answers_are_sent_back_whole_and_counted(client: anthropic.Anthropic) -> None:
    """With all fields of the client's classes; fields without a value are null."""
    answer = client.messages.create(**ASKED)
    turns = [*ASKED["messages"], {"role": "assistant", "content": [block.model_dump() for block in answer.content]}]
    turns += [{"role": "system", "content": "be brief"}, *ASKED["messages"]]
    tools: Any = [{"name": "n" * 128, "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]
    fields: Any = {"model": ASKED["model"], "messages": turns, "system": "x", "tools": tools}
    counted = client.messages.count_tokens(**fields)
    assert (
        counted.input_tokens
        == client.messages.create(**fields, max_tokens=1).usage.input_tokens
        > answer.usage.input_tokens
    )
    with pytest.raises(anthropic.BadRequestError, match="end with the user's"):
        client.messages.count_tokens(**{**fields, "messages": [*turns[:1], {"role": "assistant", "content": ""}]})


def test_the_async_client_asks_many_at_once(url: str, expected: Expected) -> None:
    """With the server's seed, because these requests have none."""
    questions = [f"Tell me of {who}." for who in ("a cat", "an owl", "Tom", "the sea", "3 + 4", "a ball", "rain", "你")]

    async def ask(client: anthropic.AsyncAnthropic, question: str) -> str:
        asked = ASKED | {"messages": [{"role": "user", "content": question}], "temperature": 1, "top_k": 20}
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            assert text_of(await stream.get_final_message()) == text_of(message)
        return text_of(message)

    async def all_at_once() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, question) for question in questions))

    decode = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5, "top_k": 20}
    texts = [expected.answer(question, **decode) for question in questions]
    assert asyncio.run(all_at_once()) == texts
    assert len(set(texts)) > 4


@each("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools_are_called(client: anthropic.Anthropic, choice: Any) -> None:
    tools: Any = [{"name": "weather", "input_schema": Weather.model_json_schema()}]
    asked = ASKED | {"max_tokens": 200, "tools": tools, "temperature": 0}
    asked["tool_choice"] = choice | {"disable_parallel_tool_use": True}
    answer = client.messages.create(**asked)
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert call.input in CITIES
    with client.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (call.name, call.input)


def test_errors_are_its_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there are tiny"):
        client.messages.create(**ASKED | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 1024 tokens"):
        client.messages.create(**ASKED | {"system": 2000 * QUESTION})
    with pytest.raises(anthropic.BadRequestError, match="nope is not supported"):
        client.messages.create(**ASKED, extra_body={"nope": 1})
