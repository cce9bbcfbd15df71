"""A request of one or several prompts on its way through the engine, and what is common to all kinds of answers."""

import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from pipelines.api.answers import AnswerInfo, usage
from pipelines.api.errors import bad_request
from pipelines.api.requests import CompletionRequest, Sampling
from pipelines.api.settings import decode_settings, field_of, refusal
from pipelines.serve.client import EngineRefused
from pipelines.serve.frames import Delta, Done, Ready, Submit
from pipelines.serve.resumption import Place, read_place
from pipelines.serve.submitted import Call, Submitted

SEED_BITS = 53  # of a drawn seed, which JavaScript's numbers can hold


class Event(NamedTuple):
    """A part of a stream."""

    data: dict[str, Any]
    id: str | None = None
    name: str | None = None


class Generation:
    """A request on its way. `accepted` first, then `body` or `events`; whoever stops before the end calls `cancel`."""

    def __init__(
        self, call: Call, request: Sampling, prompts: list[list[int]], settings: dict[str, Any], object: str
    ) -> None:
        """settings: of DecodeConfig, which win over the request's. object: the kind of the answer.

        Raises ApiError for a request that cannot be run, and where there is no engine.
        """
        ready = call.engine.info
        if ready.embeds:
            raise bad_request("this model gives vectors of texts and continues none: ask another one", "model")
        self.request = request
        self.prompts = prompts
        self.finish_reasons: dict[int, str] = {}
        """By choice, in the API's words."""
        self.num_generated = 0
        """Tokens that were written so far."""
        decode = decode_settings(request, ready.decode, call.key) | settings
        merged = dict(ready.decode) | decode
        self.num_samples = max(merged.get("n") or 1, merged.get("num_return_sequences") or 1)
        self.skips_special_tokens = bool(merged.get("skip_special_tokens", True))
        self.place = self._place(call, ready, decode)
        decode["seed"] = self._seed(ready, decode)
        self.info = AnswerInfo(call.id, object, int(time.time()), call.model, decode["seed"], ready.fingerprint)
        self._sends_ids = call.last_event_id is not None and ready.fingerprint is not None
        submits = [
            Submit(0, prompt, self._fitted(ready, decode, len(prompt)), call.adapter, streams=bool(request.stream))
            for prompt in prompts
        ]
        self._submitted = Submitted(call.engine, submits)

    def _place(self, call: Call, ready: Ready, decode: dict[str, Any]) -> Place | None:
        if not call.last_event_id:
            return None
        num_choices = len(self.prompts) * self.num_samples
        return read_place(call.last_event_id, ready.fingerprint, num_choices, decode.get("seed"))

    def _seed(self, ready: Ready, decode: dict[str, Any]) -> int:
        """Return the seed of all prompts: the place's, the request's, the server's, or one that is drawn here."""
        if self.place is not None:
            return self.place.seed
        seed = decode.get("seed", ready.decode.get("seed"))
        return random.getrandbits(SEED_BITS) if seed is None else int(seed)

    def _fitted(self, ready: Ready, decode: dict[str, Any], num_prompt: int) -> dict[str, Any]:
        """Return the settings for a prompt, with a default length that fits. Raises ApiError for what cannot fit."""
        request, limit = self.request, ready.context_length
        param = "prompt" if isinstance(request, CompletionRequest) else "messages"
        if num_prompt >= limit:
            message = f"the prompt has {num_prompt} tokens, and the model takes {limit} with the answer's: shorten it"
            raise bad_request(message, param, "context_length_exceeded")
        asked, name = decode.get("max_new_tokens"), field_of("max_new_tokens", request)
        is_given = getattr(request, str(name), None) is not None
        if is_given and isinstance(asked, int) and num_prompt + asked > limit:
            message = f"the prompt has {num_prompt} tokens and {name}={asked}, together more than the model's {limit}"
            remedy = f"give at most {limit - num_prompt}"
            raise bad_request(f"{message}: {remedy}", param, "context_length_exceeded")
        room = min(limit, ready.num_cache_tokens // self.num_samples) - num_prompt
        if is_given or asked is None or room < 1:
            return decode
        return decode | {"max_new_tokens": room if asked == "auto" else min(asked, room)}

    async def accepted(self) -> None:
        """Wait until the engine has taken all prompts. Raises ApiError for what it refuses."""
        try:
            await self._submitted.accepted()
        except EngineRefused as error:
            raise refusal(error.message, error.setting, self.request) from error

    def cancel(self) -> None:
        """Leave the request. Does nothing behind the end."""
        self._submitted.cancel()

    @property
    def dones(self) -> dict[int, Done]:
        """Return what the engine counted, by prompt."""
        return self._submitted.dones

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield what comes, with the choice that says it. Raises ApiError where the engine fails."""
        async with aclosing(self._submitted.deltas()) as deltas:
            async for prompt, delta in deltas:
                self.num_generated += len(delta.token_ids)
                yield prompt * self.num_samples + delta.sample, delta

    def usage(self, num_reasoning: int | None = None) -> dict[str, Any]:
        """Return the numbers of tokens, at the end."""
        num_cached = sum(done.num_cached_tokens for done in self.dones.values())
        return usage(sum(map(len, self.prompts)), num_cached, self.num_generated, num_reasoning)

    def usage_so_far(self) -> dict[str, Any]:
        """Return the numbers of tokens on the way; what the cache spared is not known yet."""
        return usage(sum(map(len, self.prompts)), None, self.num_generated)

    def event(self, data: dict[str, Any], had: list[tuple[int, int]]) -> Event:
        """Return a part of the stream. had: as in Place, behind it."""
        if not self._sends_ids:
            return Event(data)
        return Event(data, str(Place(self.info.system_fingerprint or "", self.info.seed, tuple(had))))

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk, with the usage that was asked for."""
        options = self.request.stream_options
        if options is None:
            return self.info.body(choices)
        if options.continuous_usage_stats:
            return self.info.body(choices, usage=self.usage_so_far())
        return self.info.body(choices, usage=None) if options.include_usage else self.info.body(choices)

    @property
    def wants_usage(self) -> bool:
        """Return whether a chunk with the usage ends the stream."""
        return bool(self.request.stream_options and self.request.stream_options.include_usage)
