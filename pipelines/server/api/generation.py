"""A generation request: its decode settings for each prompt, and the state of its answer."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from conf.schema import ModelConfig
from models.tokenizers.base import Tokenizer
from pipelines.replicas.engine_process.frames import Delta, Done, Ready
from pipelines.server.api.answers import AnswerInfo, ChoiceText, Event, TokenTexts, usage
from pipelines.server.api.errors import ApiError, bad_request, too_long
from pipelines.server.api.requests import ChatRequest, CompletionRequest, Sampling
from pipelines.server.api.resumption import StreamCursor, read_cursor
from pipelines.server.api.settings import decode_settings, field_of, refusal

SEED_BITS = 53  # size of drawn seeds; JavaScript numbers hold 53 bits exactly


@dataclass(frozen=True)
class RequestContext:
    """The properties of a request that are not in its body."""

    id: str
    """Id of the answer."""
    model: str
    """Model name in answers."""
    key: str | None = None
    """Name of the client's API key. Prefix cache entries are shared only between requests with the same key."""
    last_event_id: str | None = None
    """Value of the Last-Event-ID header. If it is set, events have ids. An empty value starts at the beginning."""


class Named(NamedTuple):
    """The adapter or soft prefix that the `model` of a request or batch line selects. At most one of the two is set."""

    adapter: str | None = None
    prefix: str | None = None


def named(config: ModelConfig, model: str) -> Named:
    """Return the adapter or the soft prefix of this name; neither is set if there is none."""
    has_adapter, has_prefix = (model in (paths or {}) for paths in (config.adapters, config.prefixes))
    return Named(model if has_adapter else None, model if has_prefix else None)


class Choice:
    """One continuation of a prompt: its length so far, and the part that a resuming client already has."""

    def __init__(self, had: tuple[int, int]) -> None:
        """`had`: numbers of tokens and characters that the client already has, as in StreamCursor."""
        self.num_tokens = 0
        self.num_chars = 0
        self.is_new = had == (0, 0)
        self._tokens_had, self._chars_had = had

    def divide(self, delta: Delta) -> tuple[ChoiceText, ChoiceText]:
        """Split a delta into the part that the client already has and the rest."""
        tokens = max(0, self._tokens_had - self.num_tokens)
        chars = max(0, self._chars_had - self.num_chars)
        self.num_tokens += len(delta.token_ids)
        self.num_chars += len(delta.text)
        received = ChoiceText(delta.text[:chars], delta.token_ids[:tokens], delta.logprobs[:tokens])
        remaining = ChoiceText(delta.text[chars:], delta.token_ids[tokens:], delta.logprobs[tokens:])
        remaining.finish_reason, remaining.stop_reason = delta.finish_reason, delta.stop_reason
        return received, remaining


class Generation:
    """A generation request with its prompts."""

    def __init__(
        self,
        request: Sampling,
        prompts: list[list[int]],
        served: Ready,
        context: RequestContext,
        tokenizer: Tokenizer | None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings`: DecodeConfig fields that override the request's. Raises ApiError for an invalid request."""
        if not served.generates:
            raise bad_request(
                "this model gives vectors or scores of texts and continues none: ask another one", "model"
            )
        self.request = request
        self.prompts = prompts
        self.dones: Mapping[int, Done] = {}
        """Final frames by prompt index, with the engine's token counts."""
        self.num_generated = 0
        """Number of tokens generated so far."""
        decode = decode_settings(request, served.decode, context.key) | dict(settings or {})
        merged = served.decode | decode
        self.num_samples = max(merged.get("n") or 1, merged.get("num_return_sequences") or 1)
        self.texts = TokenTexts(tokenizer, bool(merged.get("skip_special_tokens", True)))
        num_choices = len(prompts) * self.num_samples
        cursor = None
        if context.last_event_id:
            cursor = read_cursor(context.last_event_id, served.fingerprint, num_choices, decode.get("seed"))
        decode["seed"] = cursor.seed if cursor else _seed(served, decode)
        self.choices = [Choice(had) for had in (cursor.had if cursor else [(0, 0)] * num_choices)]
        kind = "text_completion"
        if isinstance(request, ChatRequest):
            kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self.info = AnswerInfo(context.id, kind, int(time.time()), context.model, decode["seed"], served.fingerprint)
        self._sends_ids = context.last_event_id is not None and served.fingerprint is not None
        self.settings = [self._fitted(served, decode, len(prompt)) for prompt in prompts]
        """DecodeConfig fields of each prompt."""

    def _fitted(self, served: Ready, decode: dict[str, Any], num_prompt: int) -> dict[str, Any]:
        """Return a prompt's settings. A default length is reduced to fit. Raises ApiError if the prompt cannot fit."""
        request, limit = self.request, served.context_length
        param = "prompt" if isinstance(request, CompletionRequest) else "messages"
        if num_prompt >= limit:
            raise too_long(num_prompt, limit, param)
        max_new_tokens, name = decode.get("max_new_tokens"), field_of("max_new_tokens", request)
        is_given = getattr(request, str(name), None) is not None
        if is_given and isinstance(max_new_tokens, int) and num_prompt + max_new_tokens > limit:
            message = f"the prompt has {num_prompt} tokens and {name}={max_new_tokens}, together more than the model's {limit}"
            remedy = f"give at most {limit - num_prompt}"
            raise bad_request(f"{message}: {remedy}", param, "context_length_exceeded")
        room = min(limit, served.num_cache_tokens // self.num_samples) - num_prompt
        if is_given or max_new_tokens is None or room < 1:
            return decode
        return decode | {"max_new_tokens": room if max_new_tokens == "auto" else min(max_new_tokens, room)}

    def refused(self, message: str) -> ApiError:
        """Return the API error for an engine error message."""
        return refusal(message, self.request)

    def take(self, prompt: int, delta: Delta) -> tuple[int, ChoiceText, ChoiceText]:
        """Count a delta. Return the index of its choice, the part that the client already has, and the rest."""
        index = prompt * self.num_samples + delta.sample
        self.num_generated += len(delta.token_ids)
        return index, *self.choices[index].divide(delta)

    def usage(self, num_reasoning: int | None = None) -> dict[str, Any]:
        num_cached = sum(done.num_cached_tokens for done in self.dones.values())
        return usage(sum(map(len, self.prompts)), num_cached, self.num_generated, num_reasoning)

    def event(self, choices: list[dict[str, Any]]) -> Event:
        """Return a chunk, with usage if requested and with an id if the client wants to resume the stream."""
        options, more = self.request.stream_options, dict[str, Any]()
        if options and options.continuous_usage_stats:  # the number of cached tokens is not known yet
            more["usage"] = usage(sum(map(len, self.prompts)), None, self.num_generated)
        elif options and options.include_usage:
            more["usage"] = None
        data = self.info.body(choices, **more)
        if not self._sends_ids:
            return Event(data)
        had = tuple((choice.num_tokens, choice.num_chars) for choice in self.choices)
        return Event(data, str(StreamCursor(self.info.system_fingerprint or "", self.info.seed, had)))

    @property
    def wants_usage(self) -> bool:
        """Whether a chunk with the usage ends the stream."""
        return bool(self.request.stream_options and self.request.stream_options.include_usage)


def _seed(served: Ready, decode: Mapping[str, Any]) -> int:
    """Return the seed of all prompts: the request's, the server's, or a random one."""
    seed = decode.get("seed", served.decode.get("seed"))
    return random.getrandbits(SEED_BITS) if seed is None else int(seed)
