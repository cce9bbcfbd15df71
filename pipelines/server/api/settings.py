"""Converts requests to DecodeConfig settings, and engine messages about settings to the request's field names."""

import json
import re
from collections.abc import Mapping
from typing import Any

from conf.decoding import OF_LLAMA_CPP
from conf.errors import UserError
from conf.json_schemas import prepared
from pipelines.server.api.errors import ApiError, bad_request
from pipelines.server.api.requests import ChatRequest, CompletionRequest, JsonSchemaFormat, Sampling, TextFormat

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as in OpenAI's API

SAME = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    **{name: name for name in OF_LLAMA_CPP},
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "include_stop_str_in_output": "include_stop",
    "skip_special_tokens": "skip_special_tokens",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
    "prompt_logprobs": "prompt_logprobs",
    "cache_salt": "cache_salt",
    "length_penalty": "length_penalty",
}
"""Name of the setting by name of the request field. The value is copied unchanged."""

SETTING = re.compile(r"decode\.(thinking\.max_tokens|\w+)")
UNNAMED = {
    "stop token id": "stop_token_ids",
    "allowed token id": "allowed_token_ids",
    "logit_bias token id": "logit_bias",
    "prompt and new tokens are": "max_new_tokens",
    "the request has": "n",
}
"""Some engine messages name no setting. This is the setting that caused the error, by the message's beginning."""
GUIDES = {"json_schema": "json", "lark": "grammar"}
"""Names of guide kinds in structured_outputs, where they differ from DecodeConfig's."""
OF_PROMPT = ("prompt token id", "the prompt has no tokens")
"""Beginnings of engine messages about the prompt."""


def decode_settings(request: Sampling, server: Mapping[str, Any], key: str | None = None) -> dict[str, Any]:
    """Return the settings that a request gives. The server's values apply to all other settings.

    `server`: the server's default settings. `key`: name of the client's API key.

    Raises ApiError for an incomplete answer format.
    """
    settings = {setting: getattr(request, name) for name, setting in SAME.items() if getattr(request, name) is not None}
    if request.top_k is not None:
        settings["top_k"] = max(0, request.top_k)
    if request.logit_bias is not None:
        settings["logit_bias"] = {int(id): bias for id, bias in request.logit_bias.items()}
    if request.stop is not None:
        settings["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.seed is not None:
        settings["seed"] = request.seed & (2**64 - 1)
    if (salt := cache_salt(key, request.cache_salt)) is not None:
        settings["cache_salt"] = salt
    if request.use_beam_search:
        num_beams = settings.pop("n", 1)
        settings |= {"num_beams": num_beams, "num_return_sequences": num_beams, "temperature": 0.0}
    elif "n" in settings and (server.get("num_beams") or 1) > 1:  # the server uses beam search
        settings["num_return_sequences"] = settings.pop("n")
    if guide := guide_of(request):
        settings["guide"] = guide
    if isinstance(request, ChatRequest):
        return settings | _chat_settings(request, server)
    if isinstance(request, CompletionRequest):
        return settings | _completion_settings(request, server)
    raise TypeError(f"{type(request).__name__} is not a generation request")


def cache_salt(key: str | None, request_salt: str | None) -> str | None:
    """Return the salt of the prefix cache.

    It contains the name of the API key, so that clients cannot use another key's entries. A request's own salt
    separates the entries of a key further.
    """
    return request_salt if key is None else json.dumps([key, request_salt])


def _chat_settings(request: ChatRequest, server: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"logprobs": request.top_logprobs or 0} if request.logprobs else {}
    if request.thinking_token_budget is not None:
        settings["thinking"] = {"max_tokens": request.thinking_token_budget}
    max_tokens = request.max_completion_tokens or request.max_tokens
    return settings | _length(max_tokens, "auto", server)


def thinking_setting(budget: int, start: str, end: str, is_open: bool, closing: str | None = None) -> dict[str, Any]:
    """Return the setting `thinking` for a model's reasoning.

    `start`, `end`: its markers; an empty `start`: reasoning is only at the beginning of the answer. `is_open`: whether
    the prompt ends inside reasoning. `closing`: text written at the budget, with `end` in it; None: a line break and
    `end`.
    """
    return {"max_tokens": budget, "start": start, "end": end, "is_open": is_open, "closing": closing}


def _completion_settings(request: CompletionRequest, server: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {} if request.logprobs is None else {"logprobs": request.logprobs}
    if request.echo and request.logprobs is not None:
        settings["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    max_tokens = 1 if request.max_tokens == 0 else request.max_tokens  # the token is dropped later
    return settings | _length(max_tokens, DEFAULT_MAX_TOKENS, server)


def _length(max_tokens: int | None, default: int | str, server: Mapping[str, Any]) -> dict[str, Any]:
    if max_tokens is not None:
        return {"max_new_tokens": max_tokens}
    has_limit = server.get("max_new_tokens") is not None or server.get("max_length") is not None
    return {} if has_limit else {"max_new_tokens": default}


def guide_of(request: Sampling) -> dict[str, Any] | None:
    """Return the answer's form as the setting `guide`; None for free text.

    Raises ApiError for a schema with a number that has no exact representation.
    """
    guide = _guide_of(request)
    if guide is None or "json_schema" not in guide:
        return guide
    try:
        return {"json_schema": prepared(guide["json_schema"])}
    except UserError as error:
        raise bad_request(str(error), field_of("guide", request)) from error


def _guide_of(request: Sampling) -> dict[str, Any] | None:
    if (outputs := request.structured_outputs) is not None:
        guide = outputs.model_dump(exclude_none=True)
        return {"lark" if name == "grammar" else name: value for name, value in guide.items()}
    form = request.response_format
    if form is None or isinstance(form, TextFormat):
        return None
    if not isinstance(form, JsonSchemaFormat):
        return {"json_object": True}
    if form.json_schema.json_schema is None:
        param = "response_format.json_schema.schema"
        raise bad_request(f"{param} is missing: give it, or type=json_object", param)
    return {"json_schema": form.json_schema.json_schema}


def refusal(message: str, request: Sampling) -> ApiError:
    """Return the error of status 400 for an engine error message.

    Settings get their names in the request. The first one becomes `param`.
    """
    message_for_client = SETTING.sub(lambda match: field_of(match[1], request) or match[0], message)
    for kind, name in GUIDES.items():
        message_for_client = message_for_client.replace(f"structured_outputs.{kind}", f"structured_outputs.{name}")
    if message.startswith(OF_PROMPT):
        return bad_request(message_for_client, "messages" if isinstance(request, ChatRequest) else "prompt")
    match = SETTING.search(message)
    setting = match[1] if match else next((UNNAMED[words] for words in UNNAMED if message.startswith(words)), None)
    return bad_request(message_for_client, None if setting is None else field_of(setting, request))


def field_of(setting: str, request: Sampling) -> str | None:
    """Return the request field that gives a setting; None if no field does."""
    if setting == "max_new_tokens":
        return "max_completion_tokens" if getattr(request, "max_completion_tokens", None) else "max_tokens"
    if setting == "guide":
        forms = ("response_format", "structured_outputs", "tools")
        return next((name for name in forms if getattr(request, name, None) is not None), None)
    if setting == "thinking.max_tokens":
        return "thinking_token_budget"
    if setting in ("num_beams", "num_return_sequences"):
        return "use_beam_search" if request.use_beam_search else None
    if setting in ("top_k", "logit_bias", "stop", "seed", "logprobs"):
        return setting
    return next((name for name, same_setting in SAME.items() if same_setting == setting), None)
