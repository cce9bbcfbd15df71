"""Conversations of coding agents: the bodies they send, streamed, over an engine that writes given answers."""

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from conf.serving import ServeConfig
from models.tokenizers import Tokenizer
from pipelines.replicas.engine_process.client import Answer
from pipelines.replicas.engine_process.frames import Delta, Done, Submit
from pipelines.server.api.conversation import Chat
from pipelines.server.app import create_app
from tests.helpers.chat_styles import written
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import asking, parsed, service_of
from tests.helpers.serving import run_async
from tests.helpers.small_tokenizers import byte_level

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
READ = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
ON = "reasoning_effort=max only turns reasoning on: the chat template has no levels"
CUT = "max_tokens=64000 is reduced to fit into the model's context"
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


class ScriptedEngine(FakeEngine):
    """Answers with the given texts, one per request, in pieces of seven letters."""

    def __init__(self, *texts: str) -> None:
        super().__init__(context_length=20_000, num_cache_tokens=20_000)
        self._texts = list(texts)

    async def _speak(self, answer: Answer) -> None:
        submit, text = answer.submit, self._texts.pop(0)
        answer.accept(7)
        pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
        for i, piece in enumerate(pieces, 1):
            answer.add(Delta(submit.id, 0, piece, [5], [], "stop" if i == len(pieces) else None))
        del self._answers[submit.id]
        answer.end(Done(submit.id, len(submit.prompt_token_ids), 0, len(pieces), 0.0, 0.0, 0.0))


class Agent:
    """A client of one server, with the prompts that the engine got."""

    def __init__(self, tokenizer: Tokenizer, *texts: str, **config: Any) -> None:
        self.engine = ScriptedEngine(*texts)
        self.tokenizer = tokenizer
        self.service = service_of(self.engine, **config)
        self._app = create_app(self.service, Chat(self.tokenizer, ServeConfig()), {})

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async with asking(self._app) as client:
            return await client.post(path, json=body, params={"beta": "true"})

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        submit = self.engine.submitted[-1]
        return self.tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False)

    @property
    def decode(self) -> dict[str, Any]:
        submit = self.engine.submitted[-1]
        assert isinstance(submit, Submit)
        return submit.decode


def warned(response: httpx.Response) -> set[str]:
    """Return the unused fields, and the other warnings, of the response header."""
    first, *more = response.headers["x-quintet-warning"].split("; ")
    return {*first.removeprefix("not used: ").split(", "), *more}


def check_order(text: str, *parts: str) -> None:
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def responses_body(items: list[Any]) -> dict[str, Any]:
    """Return what an agent on the Responses API sends in each turn."""
    return {
        "model": "tiny",
        "instructions": "You edit code.",
        "input": items,
        "tools": [
            {"type": "function", "name": "read_file", "description": "", "strict": False, "parameters": PATH},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "crm", "description": "", "tools": [{"type": "function", "name": "find"}]},
            {"type": "local_shell"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "max", "summary": "auto"},
        "text": {"verbosity": "low"},
        "store": True,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "max_tool_calls": 8,
        "top_logprobs": 0,
        "service_tier": "priority",
        "prompt_cache_key": "session-1",
        "prompt_cache_retention": "24h",
        "client_metadata": {"installation": "1"},
    }


FOREIGN_ITEMS = [  # what the agent keeps of another server's answers
    {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "custom_tool_call", "call_id": "c", "name": "patch", "status": "completed", "input": "+ b"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "patched"},
]


async def responses_agent(tokenizer: Tokenizer) -> None:
    agent = Agent(tokenizer, f"<think>Look.</think>\n\n{READ}", f"I read on.\n{READ}", "Done.", "Bye.")
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend a.py"}]},
    ]
    unused = {
        *("tools.custom", "tools.web_search", "tools.namespace", "tools.local_shell", "reasoning.summary"),
        *("text.verbosity", "store", "include", "service_tier", "prompt_cache_retention", ON),
    }
    types = []
    for turn in range(3):
        response = await agent.post("/v1/responses", responses_body(items))
        assert response.status_code == 200, response.text
        assert warned(response) == unused
        for event in (events := [event.data for event in parsed(response.text)]):
            EVENTS.validate_python(event)
        answer = Response.model_validate(events[-1]["response"])
        types.append([item.type for item in answer.output])
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        for call in answer.output:
            if call.type == "function_call":
                output: Any = [{"type": "input_text", "text": f"result {turn}"}]
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        if turn == 0:
            items += FOREIGN_ITEMS
            unused |= {"input.web_search_call", "input.encrypted_content"}
    assert types == [["reasoning", "function_call"], ["message", "function_call"], ["message"]]
    assert answer.output_text == "Done."
    check_order(agent.prompt, "Mend a.py", '"a.py"', "result 0", '"+ b"', "patched", "result 1")
    assert ("crm" in agent.prompt, "lark" in agent.prompt, "read_file" in agent.prompt) == (False, False, True)
    body = {name: value for name, value in responses_body(items).items() if name in COUNTED}
    counted = await agent.post("/v1/responses/input_tokens", body)
    await agent.post("/v1/responses", responses_body(items))
    num_tokens = len(agent.engine.submitted[-1].prompt_token_ids)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": num_tokens}
    assert "tools.custom" in warned(counted)
    await check_stored(agent, items)


async def check_stored(agent: Agent, items: list[Any]) -> None:
    """A server that stores responses gives the engine the same prompts, if it gets only the new items of each turn."""
    texts = f"<think>Look.</think>\n\n{READ}", f"I read on.\n{READ}", "Done."
    storing, previous = Agent(agent.tokenizer, *texts, response_store="memory"), None
    for turn in (items[:2], items[4:9], items[11:12]):  # without the items of answers
        body = responses_body(turn) | {"previous_response_id": previous}
        response = await storing.post("/v1/responses", body)
        assert ("store" in warned(response), response.status_code) == (False, 200)
        previous = [event.data for event in parsed(response.text)][-1]["response"]["id"]
    assert [submit.prompt_token_ids for submit in storing.engine.submitted] == [
        submit.prompt_token_ids for submit in agent.engine.submitted[:3]
    ]
    assert storing.service.response_store
    await storing.service.response_store.close()


COUNTED = ("model", "instructions", "input", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text")


def messages_body(turns: list[Any], thinking: dict[str, Any]) -> dict[str, Any]:
    """Return what an agent on the Messages API sends in each turn."""
    return {
        "model": "tiny",
        "max_tokens": 64_000,
        "system": [{"type": "text", "text": "You edit code."}, {"type": "text", "text": "Be brief.", **CACHED}],
        "messages": turns,
        "tools": [
            {"name": "read_file", "description": "", "input_schema": PATH, "eager_input_streaming": True, **CACHED},
            {"name": "later", "description": "", "input_schema": {"type": "object"}, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "thinking": thinking,
        "output_config": {"effort": "max"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
        "metadata": {"user_id": json.dumps({"device": "d", "session": "s"})},
        "stream": True,
    }


FOREIGN_BLOCKS = [  # what the agent keeps of another server's answers
    {"type": "redacted_thinking", "data": "gAAA"},
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
]
FOREIGN = {f"messages.content.{block['type']}" for block in FOREIGN_BLOCKS} | {
    "messages.content.content.tool_reference"
}


async def messages_agent(tokenizer: Tokenizer) -> None:
    agent = Agent(tokenizer, f"<think>Look.</think>\n\n{READ}", f"I read on.\n{READ}", "Done.")
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Mend a.py", **CACHED}]},
        {"role": "system", "content": "Sandboxed."},
    ]
    unused = {
        *("context_management.edits.clear_thinking_20251015", "diagnostics", "tools.defer_loading", CUT),
        *("tools.web_search_20250305", "messages.content.cache_control.ttl", "system.cache_control.ttl"),
        "tools.cache_control.ttl",
    }
    types = []
    for turn, thinking in enumerate(THINKING):
        body = messages_body(turns, thinking)
        response = await agent.post("/v1/messages", body)
        assert response.status_code == 200, response.text
        num_prompt = len(agent.engine.submitted[-1].prompt_token_ids)
        assert agent.decode["max_new_tokens"] == 20_000 - num_prompt
        expected = unused | (FOREIGN if turn else set()) | ({ON} if thinking["type"] != "disabled" else set())
        assert warned(response) == expected
        counted = await agent.post(
            "/v1/messages/count_tokens", {k: v for k, v in body.items() if k in ANTHROPIC_COUNTED}
        )
        assert counted.json() == {"input_tokens": num_prompt}
        assert "tools.web_search_20250305" in warned(counted)
        blocks, stop_reason = message_of(response.text)
        types.append([block["type"] for block in blocks])
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": f"result {turn}"}]}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        assert stop_reason == ("tool_use" if results else "end_turn")
        if turn == 0:
            blocks = FOREIGN_BLOCKS + blocks
            results[0]["content"].append({"type": "tool_reference", "tool_name": "later"})
        turns += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    assert types == [["thinking", "tool_use"], ["text", "tool_use"], ["text"]]
    assert agent.prompt.endswith("<think>\n\n</think>\n\n")
    check_order(agent.prompt, "Mend a.py", "Sandboxed.", "result 0", "result 1")


THINKING: list[dict[str, Any]] = [
    {"type": "adaptive", "budget_tokens": 0, "display": "summarized"},
    {"type": "enabled", "budget_tokens": 2048},
    {"type": "disabled"},
]
ANTHROPIC_COUNTED = ("model", "system", "messages", "tools", "thinking", "output_config", "context_management")


def message_of(content: str) -> tuple[list[dict[str, Any]], str]:
    """Return the blocks of a streamed message, as Anthropic's client puts them together, and the reason of its end."""
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, text=content, headers={"content-type": "text/event-stream"})
    )
    with (
        anthropic.Anthropic(api_key="k", base_url="http://s", http_client=httpx.Client(transport=transport)) as client,
        client.messages.stream(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}]) as stream,
    ):
        message = stream.get_final_message()
    return [block.model_dump(exclude_none=True) for block in message.content], str(message.stop_reason)


async def check_warnings(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(tokenizer, "a", "b", "c", "d")
    body = {"model": "tiny", "input": "Hi", "store": True}
    for _ in range(2):
        assert (await agent.post("/v1/responses", body)).headers["x-quintet-warning"] == "not used: store"
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == ["not used: store"]
    assert "x-quintet-warning" not in (await agent.post("/v1/responses", {"input": "Hi", "store": False})).headers
    chat = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "none"}
    assert "x-quintet-warning" not in (await agent.post("/v1/chat/completions", chat)).headers
    assert agent.prompt.endswith("<think>\n\n</think>\n\n")


def test_agents_hold_conversations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, _ = written(tmp_path, "chatml", byte_level())
    run_async(responses_agent(tokenizer))
    run_async(messages_agent(tokenizer))
    caplog.clear()
    run_async(check_warnings(tokenizer, caplog))
