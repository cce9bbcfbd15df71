"""Answers of /v1/chat/completions and /v1/completions: whole ones and streams."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from models.tokenizers.base import Tokenizer
from pipelines.api.answers import (
    AnswerReader,
    CompletionLogprobs,
    TokenTexts,
    api_finish_reason,
    api_stop_reason,
    chat_logprobs,
    num_reasoning_tokens,
    prompt_logprobs,
)
from pipelines.api.requests import ChatRequest, CompletionRequest
from pipelines.serve.frames import Delta, Done, Logprob
from pipelines.serve.generation import Event, Generation
from pipelines.serve.submitted import Call


class PlainReader:
    """Takes all text for content."""

    def read(self, text: str) -> list[dict[str, Any]]:
        return [{"content": text}] if text else []

    def end(self) -> list[dict[str, Any]]:
        return []


class Choice:
    """One continuation of a prompt: what it has said, and what of it a resuming client has."""

    def __init__(self, index: int, had: tuple[int, int]) -> None:
        """had: numbers of tokens and characters, as in Place."""
        self.index = index
        self.num_tokens = 0
        self.num_chars = 0
        self.is_new = had == (0, 0)
        self._tokens_had, self._chars_had = had

    @property
    def place(self) -> tuple[int, int]:
        """Return the numbers of its tokens and characters so far."""
        return self.num_tokens, self.num_chars

    def divide(self, delta: Delta) -> tuple[Delta, Delta]:
        """Return the part of a delta that the client has, and the rest."""
        tokens = max(0, self._tokens_had - self.num_tokens)
        chars = max(0, self._chars_had - self.num_chars)
        self.num_tokens += len(delta.token_ids)
        self.num_chars += len(delta.text)
        known = Delta(delta.id, delta.sample, delta.text[:chars], delta.token_ids[:tokens], delta.logprobs[:tokens])
        rest = msgspec.structs.replace(
            delta, text=delta.text[chars:], token_ids=delta.token_ids[tokens:], logprobs=delta.logprobs[tokens:]
        )
        return known, rest


class _Answering:
    """Base of both kinds of answers."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer | None) -> None:
        self.generation = generation
        self.texts = TokenTexts(tokenizer, generation.skips_special_tokens)
        num_choices = len(generation.prompts) * generation.num_samples
        had = generation.place.had if generation.place else [(0, 0)] * num_choices
        self.choices = [Choice(i, had[i]) for i in range(num_choices)]

    async def accepted(self) -> None:
        """Wait until the engine has taken the request. Raises ApiError for what it refuses."""
        await self.generation.accepted()

    def cancel(self) -> None:
        """Leave the request. Does nothing behind the end."""
        self.generation.cancel()

    def event(self, choices: list[dict[str, Any]]) -> Event:
        return self.generation.event(self.generation.chunk(choices), [choice.place for choice in self.choices])

    async def whole(self) -> list[Delta]:
        """Return all that each choice says. Raises ApiError where the engine fails."""
        said = [Delta(0, 0, "", [], []) for _ in self.choices]
        async for index, delta in self.generation.deltas():
            each = said[index]
            each.text += delta.text
            each.token_ids += delta.token_ids
            each.logprobs += delta.logprobs
            each.finish_reason, each.stop_reason = delta.finish_reason, delta.stop_reason
        return said

    def ending(self, index: int, delta: Delta, has_tool_calls: bool = False) -> dict[str, Any]:
        """Return why a choice ended; null where it goes on."""
        if delta.finish_reason is None:
            return {"finish_reason": None, "stop_reason": None}
        reason = api_finish_reason(delta.finish_reason, has_tool_calls)
        self.generation.finish_reasons[index] = reason
        return {"finish_reason": reason, "stop_reason": api_stop_reason(delta.finish_reason, delta.stop_reason)}


class ChatAnswer(_Answering):
    """The answer to a chat request."""

    def __init__(
        self,
        call: Call,
        request: ChatRequest,
        prompt_token_ids: list[int],
        make_reader: Callable[[], AnswerReader] = PlainReader,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """settings: of DecodeConfig, which the request's tools ask for. Raises ApiError as Generation does."""
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(Generation(call, request, [prompt_token_ids], settings or {}, kind), call.tokenizer)
        self._request = request
        self._make_reader = make_reader
        self._readers = [make_reader() for _ in self.choices]
        self._token_ids: list[list[int]] = [[] for _ in self.choices]
        self._has_reasoning = [False] * len(self.choices)
        self._has_tool_calls = [False] * len(self.choices)

    async def body(self) -> dict[str, Any]:
        """Return the whole answer. Raises ApiError where the engine fails."""
        said = await self.whole()
        choices = [self._choice(index, delta) for index, delta in enumerate(said)]
        generation = self.generation
        more: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None:
            more["prompt_logprobs"] = _prompt_logprobs(self.texts, generation.dones[0], self._request.prompt_logprobs)
        if self._request.return_token_ids:
            more["prompt_token_ids"] = generation.prompts[0]
        return generation.info.body(choices, usage=self.usage(), **more)

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens, at the end."""
        reasoning = [ids for ids, has in zip(self._token_ids, self._has_reasoning, strict=True) if has]
        counts = [num_reasoning_tokens(self.texts, ids, self._make_reader()) for ids in reasoning]
        return self.generation.usage(sum(counts))

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for piece in self._pieces(index, delta):
            for name, value in piece.items():
                if isinstance(value, list):
                    message.setdefault(name, []).extend(value)
                else:
                    message[name] = (message.get(name) or "") + value
        if not self._has_tool_calls[index]:
            message["content"] = message["content"] or ""
        for call in message.get("tool_calls", []):
            call.pop("index", None)
        body = {"index": index, "message": message, "logprobs": self._logprobs(delta.logprobs)}
        if self._request.return_token_ids:
            body["token_ids"] = delta.token_ids
        return body | self.ending(index, delta, self._has_tool_calls[index])

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the chunks of the stream. Raises ApiError where the engine fails."""
        for choice in self.choices:
            if choice.is_new:
                yield self.event([self._chunk(choice.index, {"role": "assistant", "content": ""}, None)])
        async with aclosing(self.generation.deltas()) as deltas:
            async for index, delta in deltas:
                for body in self._chunks(index, delta):
                    yield self.event([body])
        if self.generation.wants_usage:
            yield Event(self.generation.info.body([], usage=self.usage()))

    def _chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the parts of a choice that a delta makes: its pieces, the last one with the log probabilities, then its end."""
        known, rest = self.choices[index].divide(delta)
        self._pieces(index, known)
        pieces = self._pieces(index, rest)
        if not pieces and rest.token_ids and (rest.logprobs or self._request.return_token_ids):
            pieces = [{}]
        bodies = [self._chunk(index, piece, None) for piece in pieces]
        if bodies:
            bodies[-1] = self._chunk(index, pieces[-1], rest)
        if delta.finish_reason is not None:
            ending = self.ending(index, delta, self._has_tool_calls[index])
            bodies.append(self._chunk(index, {}, None) | ending)
        return bodies

    def _chunk(self, index: int, piece: dict[str, Any], delta: Delta | None) -> dict[str, Any]:
        logprobs = self._logprobs(delta.logprobs) if delta and delta.logprobs else None
        body = {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": None}
        if delta is not None and self._request.return_token_ids:
            body["token_ids"] = delta.token_ids
        return body

    def _pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return what a delta adds to the message."""
        reader = self._readers[index]
        self._token_ids[index] += delta.token_ids
        pieces = reader.read(delta.text)
        if delta.finish_reason is not None:
            pieces = pieces + reader.end()
        self._has_tool_calls[index] |= any("tool_calls" in piece for piece in pieces)
        self._has_reasoning[index] |= any("reasoning_content" in piece for piece in pieces)
        return pieces

    def _logprobs(self, steps: list[Logprob]) -> dict[str, Any] | None:
        return chat_logprobs(self.texts, steps, self._request.top_logprobs or 0) if self._request.logprobs else None


class CompletionAnswer(_Answering):
    """The answer to a request for completions of one or several prompts."""

    def __init__(self, call: Call, request: CompletionRequest, prompts: list[list[int]]) -> None:
        """prompts: token ids of each of the request's. Raises ApiError as Generation does."""
        super().__init__(Generation(call, request, prompts, {}, "text_completion"), call.tokenizer)
        self._request = request
        self._tokenizer = call.tokenizer
        self._writes = request.max_tokens != 0
        self._logprobs = [CompletionLogprobs(self.texts, request.logprobs or 0) for _ in self.choices]

    async def body(self) -> dict[str, Any]:
        """Return the whole answer. Raises ApiError where the engine fails."""
        said = await self.whole()
        if not self._writes:
            self.generation.num_generated = 0
            said = [Delta(0, 0, "", [], [], "length") for _ in said]
        choices = [self._choice(index, delta) for index, delta in enumerate(said)]
        return self.generation.info.body(choices, usage=self.generation.usage())

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        request, prompt = self._request, index // self.generation.num_samples
        token_ids, done = self.generation.prompts[prompt], self.generation.dones[prompt]
        echoed = self._echoed(index)
        logprobs = None
        if request.logprobs is not None:
            parts = []
            if request.echo:
                parts.append(self._logprobs[index].read_prompt(echoed, token_ids, done.prompt_logprobs or []))
            parts.append(self._logprobs[index].read(delta.logprobs))
            logprobs = {name: [each for part in parts for each in part[name]] for name in parts[0]}
        body = {"index": index, "text": echoed + delta.text, "logprobs": logprobs, **self.ending(index, delta)}
        if request.prompt_logprobs is not None:
            body["prompt_logprobs"] = _prompt_logprobs(self.texts, done, request.prompt_logprobs)
        if request.return_token_ids:
            body |= {"prompt_token_ids": token_ids, "token_ids": delta.token_ids}
        return body

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the chunks of the stream. Raises ApiError where the engine fails."""
        for choice in self.choices if self._request.echo else ():
            if choice.is_new:
                yield self.event([self._chunk(choice.index, Delta(0, 0, self._echoed(choice.index), [], []))])
        async with aclosing(self.generation.deltas()) as deltas:
            async for index, delta in deltas:
                if not self._writes:
                    self.generation.num_generated = 0
                    delta = Delta(0, 0, "", [], [], delta.finish_reason and "length")
                known, rest = self.choices[index].divide(delta)
                self._logprobs[index].read(known.logprobs)
                if rest.text or rest.token_ids or rest.finish_reason:
                    yield self.event([self._chunk(index, rest)])
        if self.generation.wants_usage:
            yield Event(self.generation.info.body([], usage=self.generation.usage()))

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs[index].read(delta.logprobs) if delta.logprobs else None
        body = {"index": index, "text": delta.text, "logprobs": logprobs, **self.ending(index, delta)}
        if self._request.return_token_ids:
            body["token_ids"] = delta.token_ids
        return body

    def _echoed(self, index: int) -> str:
        """Return the prompt's text that begins a choice, as the request wrote it."""
        if not self._request.echo:
            return ""
        prompt = self._request.prompts[index // self.generation.num_samples]
        if isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(prompt, skip_special_tokens=self.generation.skips_special_tokens)


def _prompt_logprobs(texts: TokenTexts, done: Done, num_top: int) -> list[dict[str, Any] | None]:
    return prompt_logprobs(texts, done.prompt_logprobs or [], num_top)
