"""langchain's client with the served model: sync, async, streams, tools and structured output."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.cases import each
from tests.helpers.clients import PROMPT, QUESTION, TOOL_TEMPLATE, Expected, Weather
from tests.helpers.server import served

pytest.importorskip("langchain_openai", reason="needs the extra test-clients")
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage  # noqa: E402
from langchain_openai import ChatOpenAI, OpenAI  # noqa: E402

pytestmark = pytest.mark.long

CITIES = [{"city": "Bern"}, {"city": "Rome"}]


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "template.jinja").write_text(TOOL_TEMPLATE)
    settings = (f"serve.chat_template={folder / 'template.jinja'}", "serve.response_template=hermes")
    with served(folder / "run", *settings) as (_, url):
        yield f"{url}/v1"


def chat(url: str, **options: Any) -> ChatOpenAI:
    options = {"model": "tiny", "temperature": 0, "max_tokens": 12} | options
    options["http_async_client"] = httpx.AsyncClient()  # langchain's own would outlive a test's event loop
    return ChatOpenAI(base_url=url, api_key="none", max_retries=0, **options)


def joined(chunks: list[Any]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total  # type: ignore[no-any-return]


def test_answers_are_predicts(url: str, expected: Expected) -> None:
    text = expected.answer(QUESTION, max_new_tokens=12, temperature=0.0)
    answer = chat(url).invoke(QUESTION)
    assert text
    assert answer.content == text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == answer.response_metadata["token_usage"]["completion_tokens"] > 0
    stream = joined(list(chat(url, stream_usage=True).stream(QUESTION)))
    assert stream.content == text
    assert stream.usage_metadata is not None
    assert stream.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]
    assert chat(url, use_responses_api=True).invoke(QUESTION).text == text
    assert joined(list(chat(url, use_responses_api=True).stream(QUESTION))).text == text


def test_the_async_client_asks_many_at_once(url: str, expected: Expected) -> None:
    async def ask(seed: int) -> str:
        model = chat(url, temperature=1, seed=seed)
        message = await model.ainvoke(QUESTION)
        streamed = joined([chunk async for chunk in model.astream(QUESTION)])
        assert message.content == streamed.content
        return str(message.content)

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*map(ask, range(8)))

    texts = [expected.answer(QUESTION, max_new_tokens=12, temperature=1.0, seed=seed) for seed in range(8)]
    assert asyncio.run(all_at_once()) == texts


def test_prompts_are_continued(url: str, expected: Expected) -> None:
    text = expected.text(PROMPT, max_new_tokens=12, temperature=0.0)
    model = OpenAI(model="tiny", base_url=url, api_key="none", max_retries=0, temperature=0, max_tokens=12)  # type: ignore[arg-type]
    assert model.invoke(PROMPT) == text
    assert "".join(model.stream(PROMPT)) == text
    assert [generations[0].text for generations in model.generate([PROMPT, PROMPT]).generations] == [text, text]


@each("choice", ["required", "Weather"])
def test_tools_are_called(url: str, choice: str) -> None:
    model = chat(url, max_tokens=200).bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
    answer = model.invoke("Is it warm?")
    (call,) = answer.tool_calls
    assert (call["name"], answer.content) == ("Weather", "")
    assert call["args"] in CITIES
    streamed = joined(list(model.stream("Is it warm?")))
    assert streamed.tool_calls == [call | {"id": streamed.tool_calls[0]["id"]}]


def test_results_of_tools_are_told(url: str) -> None:
    """A conversation with a call and its result is accepted, and its answer depends on the result."""
    call = {"name": "Weather", "args": {"city": "Bern"}, "id": "call00001"}
    begun = [HumanMessage("Is it warm?"), AIMessage("", tool_calls=[call])]
    model = chat(url, logprobs=True).bind_tools([Weather])
    answers = [model.invoke([*begun, ToolMessage(said, tool_call_id="call00001")]) for said in ("sun", "snow")]
    first = [answer.response_metadata["logprobs"]["content"][0]["logprob"] for answer in answers]
    assert first[0] != first[1]


@each("method", ["json_schema", "function_calling"])
def test_structured_output_has_its_type(url: str, method: Any) -> None:
    model = chat(url, max_tokens=200).with_structured_output(Weather, method=method)
    answers = [model.invoke("Where?"), asyncio.run(model.ainvoke("Where?"))]
    assert all(isinstance(answer, Weather) for answer in answers)
    assert answers[0] == answers[1]


def test_errors_are_openais(url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="there are tiny"):
        chat(url, model="other").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="give at most"):
        list(chat(url, max_tokens=5000).stream(QUESTION))
    with pytest.raises(openai.BadRequestError, match="nope is not supported"):
        chat(url, extra_body={"nope": 1}).invoke(QUESTION)
