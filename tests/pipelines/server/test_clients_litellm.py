"""litellm with the served model: sync, async, streams, tools and structured output."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import each

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import downloads prices

litellm = pytest.importorskip("litellm", reason="needs the extra test-clients")

from tests.helpers.clients import PROMPT, QUESTION, TOOL_TEMPLATE, Expected, Weather  # noqa: E402
from tests.helpers.embedding_models import write_qwen3_embedding  # noqa: E402
from tests.helpers.server import served  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")]  # of its own types
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}]
ARGUMENTS = ['{"city": "Bern"}', '{"city": "Rome"}']
Asked = dict[str, Any]


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Arguments of all requests."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "template.jinja").write_text(TOOL_TEMPLATE)
    settings = (f"serve.chat_template={folder / 'template.jinja'}", "serve.response_template=hermes")
    with served(folder / "run", *settings) as (_, url):
        common = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "num_retries": 0}
        yield common | {"model": "openai/tiny", "messages": MESSAGES, "max_tokens": 12}


def test_answers_are_predicts(asked: Asked, expected: Expected) -> None:
    text = expected.answer(QUESTION, max_new_tokens=12, temperature=0.0)
    answer = litellm.completion(**asked)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text


def test_the_async_client_asks_many_at_once(asked: Asked, expected: Expected) -> None:
    async def ask(seed: int) -> str:
        sampled = asked | {"temperature": 1, "seed": seed}
        answer = await litellm.acompletion(**sampled)
        chunks = [chunk async for chunk in await litellm.acompletion(**sampled, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert answer.choices[0].message.content == text
        return text

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*map(ask, range(8)))

    texts = [expected.answer(QUESTION, max_new_tokens=12, temperature=1.0, seed=seed) for seed in range(8)]
    assert asyncio.run(all_at_once()) == texts


def test_prompts_are_continued(asked: Asked, expected: Expected) -> None:
    text = expected.text(PROMPT, max_new_tokens=12, temperature=0.0)
    fields = {name: value for name, value in asked.items() if name != "messages"}
    fields |= {"model": "text-completion-openai/tiny", "prompt": PROMPT}
    assert litellm.text_completion(**fields).choices[0].text == text
    assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**fields, stream=True)) == text


@each("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_are_called(asked: Asked, choice: Any) -> None:
    fields = asked | {"max_tokens": 200, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = litellm.completion(**fields).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert call.function.arguments in ARGUMENTS
    (streamed,) = litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True))).choices
    assert streamed.message.tool_calls[0].function == call.function


def test_structured_output_has_its_type(asked: Asked) -> None:
    fields = asked | {"max_tokens": 200, "response_format": Weather}
    content = litellm.completion(**fields).choices[0].message.content
    later = asyncio.run(litellm.acompletion(**fields)).choices[0].message.content
    assert Weather.model_validate_json(content) == Weather.model_validate_json(later)


def test_errors_are_its_exceptions(asked: Asked) -> None:
    with pytest.raises(litellm.NotFoundError, match="there are tiny"):
        litellm.completion(**asked | {"model": "openai/other"})
    with pytest.raises(litellm.BadRequestError, match="give at most"):
        litellm.completion(**asked | {"max_tokens": 5000})
    with pytest.raises(litellm.BadRequestError, match="nope is not supported"):
        litellm.completion(**asked, extra_body={"nope": 1})


def test_documents_are_ranked(tmp_path: Path) -> None:
    """Its clients of vLLM's, Jina's and Cohere's formats."""
    write_qwen3_embedding(tmp_path)
    documents = ["a cat sat on the mat", "dogs", "\u732b"]
    with served(tmp_path / "run", f"model.path={tmp_path}", "model.dtype=float32", "serve.model_name=tiny") as (_, url):
        places = {"hosted_vllm": url, "jina_ai": url, "cohere": f"{url}/v2/rerank"}
        ranked = [
            litellm.rerank(
                model=f"{provider}/tiny", query="cats", documents=documents, top_n=2, api_base=place, api_key="none"
            ).results
            for provider, place in places.items()
        ]
    first = ranked[0]
    assert ranked == [first] * 3
    assert len(first) == 2
    assert first[0]["relevance_score"] >= first[1]["relevance_score"]
    assert all(result["document"]["text"] == documents[result["index"]] for result in first)
