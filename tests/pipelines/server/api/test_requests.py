"""Requests are strict: each wrong, unknown or unsupported field is one line with the API's name of the field."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pipelines.server.api.errors import ApiError
from pipelines.server.api.message_requests import MessagesRequest
from pipelines.server.api.parsing import check_request, parse_request
from pipelines.server.api.pooling import EmbeddingRequest
from pipelines.server.api.ranking import RerankRequest, ScoreRequest
from pipelines.server.api.requests import MAX_FIELDS, ChatRequest, CompletionRequest, Shape
from pipelines.server.api.response_requests import ResponseRequest
from tests.helpers.cases import each

USER = {"role": "user", "content": "Hi"}

PART = {"type": "text", "text": "a"}


def nested(num_levels: int) -> dict[str, Any]:
    """Return nested objects and lists, alternating."""
    value: Any = 1
    for i in reversed(range(num_levels)):
        value = {"a": value} if i % 2 == 0 else [value]
    return value


def tool_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def read(kind: type[Shape], **fields: Any) -> Any:
    return parse_request(kind, json.dumps({"model": "tiny", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return read(ChatRequest, **{"messages": [USER], **fields})


def completion(**fields: Any) -> CompletionRequest:
    return read(CompletionRequest, **{"prompt": "Once", **fields})


@each(
    ("fields", "param", "message"),
    [
        ({"temperature": 3}, "temperature", "temperature=3 is not allowed: give less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "temperature='1' is not allowed: give a valid number"),
        ({"temperature": True}, "temperature", "give a valid number"),
        ({"n": 1.0}, "n", "n=1.0 is not allowed: give a valid integer"),
        ({"n": 9}, "n", "less than or equal to 8"),
        ({"n": 2, "temperature": 0}, "n", "n=2 is not allowed: with temperature=0"),
        (
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens",
            "max_tokens=3 and max_completion_tokens=4 differ",
        ),
        ({"functions": []}, "functions", "functions is not supported: give tools"),
        ({"audio": {}}, "audio", "audio is not supported: this server reads and writes only text"),
        ({"prediction": {}}, "prediction", "prediction is not supported"),
        ({"web_search_options": {}}, "web_search_options", "web_search_options is not supported"),
        ({"temprature": 1}, "temprature", "temprature is not supported: there is no such field here: leave it out"),
        ({"store": True}, "store", "store=True is not allowed: give False"),
        ({"service_tier": "flex"}, "service_tier", "service_tier='flex' is not allowed: give 'auto' or 'default'"),
        ({"priority": 1}, "priority", "priority=1 is not allowed: give 0"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is missing"),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            "messages[0].role",
            "'developer', 'user', 'assistant' or 'tool'",
        ),
        (
            {"messages": [USER, {**USER, "content": [{"type": "image_url"}]}]},
            "messages[1].content[0].type",
            "give 'text'",
        ),
        ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood", "no such field"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs is for logprobs=true"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "give stream=true"),
        ({"stream": True, "use_beam_search": True}, "stream", "beams have no single text"),
        ({"length_penalty": 2}, "length_penalty", "use_beam_search=true"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "pattern"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"tool_choice": "auto"}, "tool_choice", "tool_choice needs tools"),
        ({"structured_outputs": {}}, "structured_outputs", "structured_outputs has none: give one of json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "has json, regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"seed": 2**64}, "seed", "less than 18446744073709551616"),
        (
            {"reasoning_effort": "huge"},
            "reasoning_effort",
            "'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true: give only one",
        ),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "greater than or equal to 0"),
        ({"tools": [tool_of(nested(65))]}, "tools[0].function.parameters", "give JSON of at most 64 levels"),
        ({"chat_template_kwargs": nested(900)}, "chat_template_kwargs", "give JSON of at most 64 levels"),
        ({"structured_outputs": {"json": nested(65)}}, "structured_outputs.json", "give JSON of at most 64 levels"),
        ({"messages": [{**USER, "content": [PART] * 1025}]}, "messages[0].content", "at most 1024 items"),
    ],
)
def test_a_wrong_chat_request_is_one_line_with_its_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert message in error.message
    assert "\n" not in error.message
    assert error.body()["error"] == {
        "message": error.message,
        "type": "invalid_request_error",
        "param": param,
        "code": None,
    }


@each(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "give a number above 0, or echo=true"),
        ({"best_of": 2}, "best_of", "best_of=2 is not allowed: all samples are answered: give n=1"),
        ({"suffix": "x"}, "suffix", "suffix is not supported"),
        ({"logprobs": True}, "logprobs", "give a valid integer"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt[0]", "at least 1 item"),
        ({"prompt": ["a"] * 65}, "prompt", "at most 64 items"),
        ({"prompt": [1, -1]}, "prompt[1]", "greater than or equal to 0"),
        ({"prompt": {"a": 1}}, "prompt", "is not allowed"),
        ({"messages": [USER]}, "messages", "messages is not supported"),
    ],
)
def test_a_wrong_completion_is_one_line_with_its_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in caught.value.message


CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def said(content: Any, kind: type[Shape] = MessagesRequest) -> dict[str, Any]:
    name = "input" if kind is ResponseRequest else "messages"
    return {name: [{"role": "user", "content": content}], **({"max_tokens": 1} if name == "messages" else {})}


BLAMED: list[tuple[type[Shape], dict[str, Any], str, str]] = [
    (ResponseRequest, {"input": [USER, CALL]}, "input[1].call_id", "is missing"),
    (
        ResponseRequest,
        {"input": [USER, {**CALL, "type": "function_call_output"}]},
        "input[1].call_id",
        "is missing",
    ),
    (ResponseRequest, {"input": [{"type": "message", "role": "user"}]}, "input[0].content", "is missing"),
    (ResponseRequest, said(5, ResponseRequest), "input[0].content", "give a valid string or a valid list"),
    (
        ResponseRequest,
        said([{"type": "input_image"}], ResponseRequest),
        "input[0].content[0].type",
        "'input_text', ",
    ),
    (ResponseRequest, {"input": [{**USER, "role": "robot"}]}, "input[0].role", "or 'assistant'"),
    (
        ResponseRequest,
        {"input": [{"type": "x"}]},
        "input[0].type",
        "'function_call_output', 'custom_tool_call_output', 'reasoning', ",
    ),
    (ResponseRequest, {"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "'item_reference'"),
    (ResponseRequest, {"input": "a", "tools": [{"type": "robot"}]}, "tools[0].type", "give 'function', "),
    (ResponseRequest, {"input": "a", "tools": [{"type": "function", "name": "f", "nope": 1}]}, "tools[0].nope", ""),
    (ResponseRequest, {"input": "a", "tools": [{"type": "mcp", **nested(65)}]}, "tools[0]", "at most 64 levels"),
    (ResponseRequest, {"input": "a", "reasoning": {"effort": "low", "nope": 1}}, "reasoning.nope", "no such field"),
    (ResponseRequest, {"input": "a", "include": ["nope"]}, "include[0]", "'reasoning.encrypted_content'"),
    (ResponseRequest, {"input": "a", "max_tool_calls": 0}, "max_tool_calls", "greater than or equal to 1"),
    (MessagesRequest, {**said("a"), "tools": [{"type": "robot_20250305"}]}, "tools[0].type", "pattern"),
    (MessagesRequest, {**said("a"), "tools": [{"name": "f", "nope": 1}]}, "tools[0].input_schema", "is missing"),
    (
        MessagesRequest,
        {**said("a"), "thinking": {"type": "on"}},
        "thinking.type",
        "'adaptive', 'enabled' or 'disabled'",
    ),
    (
        MessagesRequest,
        {**said("a"), "thinking": {"type": "enabled", "budget_tokens": -1}},
        "thinking.budget_tokens",
        "",
    ),
    (MessagesRequest, {**said("a"), "output_config": {"effort": "huge"}}, "output_config.effort", "or 'max'"),
    (
        MessagesRequest,
        {**said("a"), "context_management": {"edits": [{"type": "x"}]}},
        "context_management.edits[0].type",
        "'clear_thinking_20251015'",
    ),
    (
        ResponseRequest,
        {"text": {"format": {"type": "json_schema"}}, "input": "a"},
        "text.format.name",
        "is missing",
    ),
    (MessagesRequest, said([{**PART, "nope": 1}]), "messages[0].content[0].nope", "no such field"),
    (MessagesRequest, said([{"type": "text", "nope": 1}]), "messages[0].content[0].text", "is missing"),
    (MessagesRequest, said([{**PART, "text": 5}]), "messages[0].content[0].text", "give a valid string"),
    (MessagesRequest, said([{"type": "image"}]), "messages[0].content[0].type", "give 'text' or 'tool_result'"),
    (MessagesRequest, said([{}]), "messages[0].content[0].type", "is missing"),
    (
        MessagesRequest,
        said([{**RESULT, "content": [{**PART, "nope": 1}]}]),
        "messages[0].content[0].content[0].nope",
        "",
    ),
    (
        ChatRequest,
        {"messages": [USER], "tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
        "",
    ),
    (ChatRequest, {"messages": [USER], "tool_choice": {"type": "x"}}, "tool_choice.type", "give 'function'"),
    (ChatRequest, {"messages": [USER], "stop": ["a", 5]}, "stop[1]", "give a valid string"),
    (CompletionRequest, {"prompt": [5, "a"]}, "prompt[1]", "give a valid integer"),
    (EmbeddingRequest, {"input": ["a"] * 2049}, "input", "at most 2048 items"),
    (RerankRequest, {"query": "a", "documents": ["a"] * 10**6}, "documents", "at most 2048 items"),
    (RerankRequest, {"query": "a", "documents": ["a", {"txt": "b"}]}, "documents[1].text", "is missing: give it"),
    (ScoreRequest, {"queries": ["a", 5], "documents": "b"}, "queries[1]", "give a valid string"),
]


def test_the_alternative_that_the_sender_meant_is_blamed() -> None:
    for kind, fields, param, message in BLAMED:
        with pytest.raises(ApiError) as caught:
            read(kind, **fields)
        assert (caught.value.status, caught.value.param) == (400, param), caught.value.message
        assert message in caught.value.message


def test_a_body_that_is_not_a_json_object_is_refused() -> None:
    for content in (b"", b"{", b"\xff", b"[" * 100_000, b'{"a": ' * 100_000):
        with pytest.raises(ApiError, match="the body is not JSON"):
            parse_request(ChatRequest, content)
    for content in (b"[]", b"1", b"null"):
        with pytest.raises(ApiError, match="the body is not allowed: give an object"):
            parse_request(ChatRequest, content)


@each(
    ("kind", "fields"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "x"}] * 10_000}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}] * 100}),
        (ChatRequest, {"messages": [USER], **{f"f{i}": 1 for i in range(10_000)}}),
        (ChatRequest, {"messages": [{**USER, **{f"f{i}": 1 for i in range(10_000)}}]}),
        (ChatRequest, {"messages": [USER], "logit_bias": {f"f{i}": 1 for i in range(10_000)}}),
        (ChatRequest, {"messages": [USER], "metadata": {f"f{i}": 1 for i in range(10_000)}}),
        (ChatRequest, {"messages": [USER], "modalities": ["x"] * 10_000}),
        (CompletionRequest, {"prompt": [-1] * 10_000}),
        (CompletionRequest, {"prompt": [["a"] * 10_000]}),
        (CompletionRequest, {"prompt": [None] * 10_000}),
        (EmbeddingRequest, {"input": [[]] * 10_000}),
        (RerankRequest, {"query": "a", "documents": [{}] * 10_000}),
        (ScoreRequest, {"queries": [1] * 10_000, "documents": [None] * 10_000}),
        (ResponseRequest, {"input": [{"role": "user", "content": [{"type": "x"}] * 10_000}]}),
        (ResponseRequest, {"input": [{"type": "x"}] * 4000}),
        (ResponseRequest, {"input": "a", "include": ["x"] * 10_000}),
        (ResponseRequest, {"input": "a", "tools": [{"type": "x"}] * 10_000}),
        (ResponseRequest, {"input": "a", "context_management": [1] * 10_000}),
        (ResponseRequest, {"input": [{"type": "additional_tools", "role": "developer", "tools": [{}] * 10_000}]}),
        (ResponseRequest, {"input": [{"type": "mcp_call", **{f"f{i}": 1 for i in range(10_000)}}]}),
        (MessagesRequest, {"max_tokens": 1, "messages": [USER], "tools": [{"type": "x"}] * 10_000}),
        (MessagesRequest, {"max_tokens": 1, "messages": [USER], "tools": [1] * 10_000}),
        (MessagesRequest, {"max_tokens": 1, "messages": [USER], "context_management": {"edits": [{}] * 10_000}}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "assistant", "content": [{"type": "x"}] * 10_000}]}),
        (MessagesRequest, {"max_tokens": 1, "messages": [USER], "system": [{"type": "x"}] * 10_000}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "x"}] * 10_000}]}),
    ],
)
def test_thousands_of_faults_are_a_few_errors(kind: type[Shape], fields: dict[str, Any]) -> None:
    """Each of pydantic's errors takes some 10 us and delays all other clients."""
    with pytest.raises(ApiError) as caught:
        read(kind, **fields)
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() <= MAX_FIELDS


def test_a_value_of_too_many_levels_to_be_shown_is_named() -> None:
    value: list[Any] = []
    for _ in range(10_000):
        value = [value]
    with pytest.raises(ApiError, match=r"top_p=\(JSON of too many levels\) is not allowed: give a valid number"):
        check_request(ChatRequest, {"model": "tiny", "messages": [USER], "top_p": value})


def test_depth_counts_the_levels() -> None:
    for fields in ({"tools": [tool_of(nested(64))]}, {"structured_outputs": {"json": nested(64)}}):
        assert chat(**fields)


def test_half_a_surrogate_pair_and_infinities_are_refused() -> None:
    with pytest.raises(ApiError, match="the body is not JSON: 'utf-8' codec"):
        parse_request(CompletionRequest, b'{"model": "tiny", "prompt": "\xed\xa0\x80"}')
    with pytest.raises(ApiError, match="half a surrogate pair"):
        parse_request(CompletionRequest, b'{"model": "tiny", "prompt": "\\ud800"}')
    assert parse_request(CompletionRequest, b'{"model": "tiny", "prompt": "\\ud83d\\ude00"}').prompt == "\U0001f600"
    with pytest.raises(ApiError) as caught:
        parse_request(CompletionRequest, b'{"model": "tiny", "prompt": "a", "min_p": NaN}')
    assert caught.value.param == "min_p"
    for constant in ("NaN", "Infinity", "-Infinity"):
        tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"a": {constant}}}}}}}]'
        body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "a"}}], "tools": {tools}}}'
        with pytest.raises(ApiError, match=f"the body is not JSON: {constant} is no number"):
            parse_request(ChatRequest, body.encode())


def test_null_is_left_out() -> None:
    names = set(ChatRequest.model_fields) - {"model", "messages"}
    assert chat(**dict.fromkeys(names)) == chat()
    names = set(CompletionRequest.model_fields) - {"model", "prompt"}
    assert completion(**dict.fromkeys(names)) == completion()


def test_prompts_are_texts_or_ids() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1, 2], [3]]).prompts == [[1, 2], [3]]
    assert read(EmbeddingRequest, input=[[1], [2]]).input == [[1], [2]]


def test_a_conversation_is_what_templates_take() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        {**USER, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    expected = [
        {"role": "developer", "content": "Be\nkind."},
        USER,
        {"role": "assistant", "tool_calls": [call]},
        messages[3],
    ]
    assert chat(messages=messages).conversation() == expected
