"""The DecodeConfig settings of requests, and the request fields of the engine's errors."""

from typing import Any

import pytest

from conf.decoding import DecodeConfig
from pipelines.server.api.errors import ApiError
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import ChatRequest, CompletionRequest
from pipelines.server.api.settings import decode_settings, refusal
from tests.helpers.cases import each

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatRequest:
    return check_request(ChatRequest, {"model": "tiny", "messages": MESSAGES, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return check_request(CompletionRequest, {"model": "tiny", "prompt": "Once", **fields})


def test_every_field_that_is_a_setting_becomes_it() -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "17": 3.5},
        "seed": 9,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "bad_words": ["no"],
        "allowed_token_ids": [1, 5],
        "min_tokens": 2,
        "max_tokens": 30,
        "cache_salt": "mine",
        "prompt_logprobs": 3,
        "typical_p": 0.8,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dynatemp_range": 0.3,
        "dynatemp_exponent": 2.0,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n", "end"],
    }
    expected = {
        **{name: value for name, value in fields.items() if name in vars(DecodeConfig())},
        "logit_bias": {5: -100, 17: 3.5},
        "include_stop": True,
        "min_new_tokens": 2,
        "max_new_tokens": 30,
    }
    for request in (chat(**fields), completion(**fields)):
        settings = decode_settings(request, {})
        assert settings == expected
        DecodeConfig().replaced(settings)


@each(
    ("request_", "expected"),
    [
        (chat(), {"max_new_tokens": "auto"}),
        (completion(), {"max_new_tokens": 16}),
        (chat(max_completion_tokens=5), {"max_new_tokens": 5}),
        (chat(max_tokens=5, max_completion_tokens=5), {"max_new_tokens": 5}),
        (completion(max_tokens=0, echo=True), {"max_new_tokens": 1}),
        (completion(top_k=-1, stop="a", seed=-1), {"max_new_tokens": 16, "top_k": 0, "stop": ["a"], "seed": 2**64 - 1}),
        (chat(logprobs=True), {"max_new_tokens": "auto", "logprobs": 0}),
        (chat(logprobs=True, top_logprobs=5), {"max_new_tokens": "auto", "logprobs": 5}),
        (chat(logprobs=False), {"max_new_tokens": "auto"}),
        (completion(logprobs=2), {"max_new_tokens": 16, "logprobs": 2}),
        (completion(logprobs=2, echo=True), {"max_new_tokens": 16, "logprobs": 2, "prompt_logprobs": 2}),
        (
            completion(n=3, use_beam_search=True),
            {"max_new_tokens": 16, "num_beams": 3, "num_return_sequences": 3, "temperature": 0.0},
        ),
        (chat(response_format={"type": "text"}), {"max_new_tokens": "auto"}),
        (chat(response_format={"type": "json_object"}), {"max_new_tokens": "auto", "guide": {"json_object": True}}),
        (
            chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}),
            {"max_new_tokens": "auto", "guide": {"json_schema": {"type": "null"}}},
        ),
        (completion(structured_outputs={"json": {}}), {"max_new_tokens": 16, "guide": {"json_schema": {}}}),
        (completion(structured_outputs={"grammar": "s: x"}), {"max_new_tokens": 16, "guide": {"lark": "s: x"}}),
        (completion(structured_outputs={"choice": ["a"]}), {"max_new_tokens": 16, "guide": {"choice": ["a"]}}),
    ],
)
def test_settings_of_a_request(request_: Any, expected: dict[str, Any]) -> None:
    assert decode_settings(request_, {}) == expected


def test_the_servers_length_holds_where_a_request_says_none() -> None:
    for server in ({"max_new_tokens": 40}, {"max_length": 80}):
        assert decode_settings(chat(), server) == decode_settings(completion(), server) == {}
        assert decode_settings(chat(max_tokens=3), server) == {"max_new_tokens": 3}


def test_n_is_the_number_of_texts_also_of_the_servers_search() -> None:
    server = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 9}
    assert decode_settings(chat(n=1), server) == {"num_return_sequences": 1}
    assert decode_settings(completion(n=3), server) == {"num_return_sequences": 3}
    assert decode_settings(chat(), server) == {}
    assert decode_settings(chat(n=3), {"num_beams": 1, "max_new_tokens": 9}) == {"n": 3}


def test_no_request_names_the_salt_of_another_key() -> None:
    keys = [("alice", None), ("bob", None), ("bob", "alice"), ("alice", "bob"), ("bob", '["alice", null]')]
    assert len(
        {decode_settings(completion(cache_salt=request_salt), {}, key)["cache_salt"] for key, request_salt in keys}
    ) == len(keys)
    assert decode_settings(completion(cache_salt="own"), {})["cache_salt"] == "own"
    assert "cache_salt" not in decode_settings(completion(), {})


def test_a_schema_without_a_schema_is_refused() -> None:
    with pytest.raises(ApiError, match="schema is missing: give it, or type=json_object") as caught:
        decode_settings(chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}), {})
    assert caught.value.param == "response_format.json_schema.schema"


@each(
    ("request_", "setting", "param"),
    [
        (chat(), "max_new_tokens", "max_tokens"),
        (chat(max_completion_tokens=3), "max_new_tokens", "max_completion_tokens"),
        (chat(), "include_stop", "include_stop_str_in_output"),
        (chat(response_format={"type": "json_object"}), "guide", "response_format"),
        (chat(structured_outputs={"regex": "("}), "guide", "structured_outputs"),
        (completion(use_beam_search=True), "num_beams", "use_beam_search"),
        (chat(thinking_token_budget=5), "thinking.max_tokens", "thinking_token_budget"),
        (completion(), "num_beams", None),
        (completion(), "logit_bias", "logit_bias"),
        (completion(), None, None),
    ],
)
def test_a_refusal_has_the_apis_name(request_: Any, setting: str | None, param: str | None) -> None:
    error = refusal(f"decode.{setting}=5 is not allowed" if setting else "the prompt is empty", request_)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(f"{param or f'decode.{setting}'}=5" if setting else "the prompt is empty")


@each(
    ("request_", "message", "param"),
    [
        (completion(), "prompt token id 9 is not in the vocabulary: give ids from 0 to 8", "prompt"),
        (completion(), "the prompt has no tokens, and the tokenizer adds no BOS", "prompt"),
        (chat(), "the prompt has no tokens, and the tokenizer adds no BOS", "messages"),
        (chat(), "stop token id 9 is not in the vocabulary: give ids from 0 to 8", "stop_token_ids"),
        (
            chat(),
            "prompt and new tokens are 900, but the KV cache holds 800: raise device.kv_cache_memory",
            "max_tokens",
        ),
        (chat(), "the request has 8 sequences, but device.max_batched_tokens=4", "n"),
    ],
)
def test_a_refusal_that_names_no_setting_has_a_field(request_: Any, message: str, param: str) -> None:
    error = refusal(message, request_)
    assert (error.status, error.param, error.message) == (400, param, message)


@each(
    ("fields", "kind", "name"),
    [
        ({"structured_outputs": {"json": {}}}, "json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "s: x"}}, "lark", "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "x"}}, "regex", "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}}, "json_schema", "response_format.json_schema"),
    ],
)
def test_a_guide_that_is_refused_has_the_requests_name(fields: dict[str, Any], kind: str, name: str) -> None:
    error = refusal(f"decode.guide.{kind} cannot be used", chat(**fields))
    assert (error.param, error.message) == (next(iter(fields)), f"{name} cannot be used")
