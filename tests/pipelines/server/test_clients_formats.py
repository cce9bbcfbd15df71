"""Calls in every chat format, streamed and whole, through the clients of OpenAI, Anthropic, langchain and litellm."""

import asyncio
import json
import os
from typing import Any

import anthropic
import openai
import pytest

from conf.serving import ServeConfig
from models.chat.entries import entries
from models.chat.writer import Call, write_calls
from pipelines.replicas.engine_process.client import Answer
from pipelines.replicas.engine_process.frames import Delta, Done
from pipelines.server.api.conversation import Chat
from pipelines.server.app import create_app
from tests.helpers.clients import TOOL_TEMPLATE
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import URL, asking, jobs, service_of
from tests.helpers.serving import run_async, tokenizer

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
PARAMETERS = {"weather": WEATHER, "clock": {"type": "object", "properties": {}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in PARAMETERS.items()
]
CALLS = [("weather", {"city": "北京 <b>\n", "days": 3}), ("clock", {})]
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
ASKED: Any = {"model": "tiny", "messages": MESSAGES}
Result = tuple[str, str, list[tuple[str, Any]]]
"""Reasoning, content, and calls with their arguments as objects."""


class ScriptedEngine(FakeEngine):
    """Answers every request with one text, in pieces of three characters."""

    def __init__(self, answer_text: str) -> None:
        super().__init__(context_length=4096)
        self._pieces = [answer_text[i : i + 3] for i in range(0, len(answer_text), 3)]

    async def _speak(self, answer: Answer) -> None:
        id, num_prompt = answer.submit.id, len(answer.submit.prompt_token_ids)
        answer.accept(7)
        for number, piece in enumerate(self._pieces, 1):
            reason = "stop" if number == len(self._pieces) else None
            answer.add(Delta(id, 0, piece, [5], [], reason))
            await asyncio.sleep(0)
        del self._answers[id]
        answer.end(Done(id, num_prompt, 0, len(self._pieces), 0.001, 0.002, 0.01))


async def openai_results(client: openai.AsyncOpenAI) -> list[Result]:
    answer = (await client.chat.completions.create(**ASKED, tools=TOOLS)).choices[0]
    assert answer.finish_reason == "tool_calls"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls or []]  # type: ignore[union-attr]
    plain: Result = (getattr(answer.message, "reasoning_content", ""), answer.message.content or "", calls)
    reasoning, content, texts = "", "", list[list[str]]()
    async with client.chat.completions.stream(**ASKED, tools=TOOLS) as stream:
        async for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                delta = event.chunk.choices[0].delta
                reasoning += getattr(delta, "reasoning_content", "") or ""
                content += delta.content or ""
                for call in delta.tool_calls or []:
                    if call.id:
                        texts.append([call.function.name, ""])  # type: ignore[union-attr, list-item]
                    texts[call.index][1] += call.function.arguments or ""  # type: ignore[union-attr]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = await client.responses.create(model="tiny", input=MESSAGES, tools=tools)
    async with client.responses.stream(model="tiny", input=MESSAGES, tools=tools) as stream:
        streamed = await stream.get_final_response()
    for items in (response.output, streamed.output):
        names = [(item.name, json.loads(item.arguments)) for item in items if item.type == "function_call"]
        assert names == calls
    return [plain, (reasoning, content, [(name, json.loads(text)) for name, text in texts])]


async def anthropic_results(client: anthropic.AsyncAnthropic) -> list[Result]:
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in PARAMETERS.items()]
    asked: Any = ASKED | {"tools": tools, "max_tokens": 99}
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    results: list[Result] = []
    for message in (await client.messages.create(**asked), streamed):
        assert message.stop_reason == "tool_use"
        thinking = "".join(block.thinking for block in message.content if block.type == "thinking")
        text = "".join(block.text for block in message.content if block.type == "text")
        results.append(
            (thinking, text, [(block.name, block.input) for block in message.content if block.type == "tool_use"])
        )
    return results


async def other_results(client: openai.AsyncOpenAI) -> list[Result]:
    """Return the results of langchain and litellm, where they are installed."""
    results: list[Result] = []
    try:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import downloads prices
        import litellm
        from langchain_openai import ChatOpenAI
    except ImportError:
        return results
    arguments = {"model": "openai/tiny", "messages": MESSAGES, "tools": TOOLS, "client": client}
    chunks = [chunk async for chunk in await litellm.acompletion(**arguments, stream=True)]
    for answer in (await litellm.acompletion(**arguments), litellm.stream_chunk_builder(chunks)):
        message = answer.choices[0].message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        results.append((getattr(message, "reasoning_content", None) or "", message.content or "", calls))
    chat = ChatOpenAI(model="tiny", base_url=f"{URL}/v1", api_key="none", async_client=client.chat.completions)  # type: ignore[arg-type]
    bound = chat.bind_tools(TOOLS)
    total: Any = None
    async for chunk in bound.astream("Weather?"):
        total = chunk if total is None else total + chunk
    for message in (await bound.ainvoke("Weather?"), total):
        calls = [(call["name"], call["args"]) for call in message.tool_calls]
        results.append((results[0][0], str(message.content), calls))  # langchain has no reasoning of this API
    return results


async def check_format(name: str, template: str) -> None:
    form = entries()[name].form
    assert form.calls
    calls = CALLS[: form.calls.max_calls]
    reasoning = form.reasoning if form.reasoning and form.reasoning.open else None
    before = f"{reasoning.open}hm{reasoning.close}" if reasoning else ""
    written = write_calls(form.calls, [Call(name, arguments) for name, arguments in calls])
    if form.calls.body == "harmony":
        before += "<|start|>assistant"
    engine = ScriptedEngine(before + written)
    service = service_of(engine)
    chat = Chat(tokenizer(), ServeConfig(chat_template=template, response_template=name))
    expected: Result = ("hm" if reasoning else "", "", calls)
    async with asking(create_app(service, chat, {}, jobs())) as http:
        options: Any = {"api_key": "none", "max_retries": 0, "http_client": http}
        results = await openai_results(openai.AsyncOpenAI(base_url=f"{URL}/v1", **options))
        results += await anthropic_results(anthropic.AsyncAnthropic(base_url=URL, **options))
        results += await other_results(openai.AsyncOpenAI(base_url=f"{URL}/v1", **options))
    assert results == [expected] * len(results), name
    chat.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of litellm's own types
def test_calls_of_every_format_reach_the_clients(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    for name, entry in entries().items():
        if entry.form.calls:
            run_async(check_format(name, str(template)))
