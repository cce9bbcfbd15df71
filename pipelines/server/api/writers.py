"""Writers of answers: the engine's output in the formats of chat completions and of completions."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pipelines.replicas.engine_process.frames import Logprob
from pipelines.server.api.answers import (
    DONE,
    ChoiceText,
    CompletionLogprobs,
    Event,
    TokenTexts,
    api_finish_reason,
    api_stop_reason,
    chat_logprobs,
    prompt_logprobs,
)
from pipelines.server.api.errors import ApiError
from pipelines.server.api.generation import Generation
from pipelines.server.api.message_reader import MessageReader, add_delta
from pipelines.server.api.requests import ChatRequest, CompletionRequest
from pipelines.server.api.traced_texts import TracedTexts


class Writer(Protocol):
    """Writes one answer, as a body or as events."""

    def body(self, choices: list[ChoiceText]) -> dict[str, Any]:
        """Return the whole answer. `choices`: the complete output of each choice."""
        ...

    def begin(self) -> list[Event]:
        """Return the first events, before the engine has produced output."""
        ...

    def read(self, index: int, received: ChoiceText, remaining: ChoiceText) -> list[Event]:
        """Return the events for the next part of a choice.

        `received`: the part that a resuming client already has. `remaining`: the rest.
        """
        ...

    def end(self) -> list[Event]:
        """Return the last events."""
        ...

    def failed(self, error: ApiError) -> Event:
        """Return the last event of a stream that fails."""
        ...


class ChatWriter:
    """Writes the answer to a chat request."""

    def __init__(
        self,
        generation: Generation,
        request: ChatRequest,
        make_reader: Callable[[], MessageReader],
        traced: TracedTexts | None = None,
    ) -> None:
        """`make_reader`: returns a parser for the answer of a sample. `traced`: gets the answer for a trace."""
        self.generation = generation
        self._traced = traced
        self._request = request
        self._make_reader = make_reader
        choices = generation.choices
        self._readers = [make_reader() for _ in choices]
        self._token_ids: list[list[int]] = [[] for _ in choices]
        self._has_reasoning = [False] * len(choices)
        self._has_tool_calls = [False] * len(choices)

    def body(self, choices: list[ChoiceText]) -> dict[str, Any]:
        bodies = [self._choice(index, choice) for index, choice in enumerate(choices)]
        generation, more = self.generation, dict[str, Any]()
        if self._request.prompt_logprobs is not None:
            more["prompt_logprobs"] = _prompt_logprobs(generation, 0, self._request.prompt_logprobs)
        if self._request.return_token_ids:
            more["prompt_token_ids"] = generation.prompts[0]
        return generation.info.body(bodies, usage=self.usage(), **more)

    def begin(self) -> list[Event]:
        """Return a chunk with the role for each choice of which the client has received nothing."""
        first = {"role": "assistant", "content": ""}
        new = [index for index, choice in enumerate(self.generation.choices) if choice.is_new]
        return [self.generation.event([self._chunk(index, first, None)]) for index in new]

    def read(self, index: int, received: ChoiceText, remaining: ChoiceText) -> list[Event]:
        """Return the chunks of the message deltas and of the end. The last delta carries the log probabilities."""
        self._pieces(index, received)
        pieces = self._pieces(index, remaining)
        if not pieces and remaining.token_ids and (remaining.logprobs or self._request.return_token_ids):
            pieces = [{}]
        bodies = [self._chunk(index, piece, None) for piece in pieces]
        if bodies:
            bodies[-1] = self._chunk(index, pieces[-1], remaining)
        if remaining.finish_reason is not None:
            bodies.append(self._chunk(index, {}, None) | self._ending(index, remaining))
        return [self.generation.event([body]) for body in bodies]

    def usage_chunk(self) -> list[Event]:
        """Return the chunk with the usage, if the request asks for it."""
        return [Event(self.generation.info.body([], usage=self.usage()))] if self.generation.wants_usage else []

    def end(self) -> list[Event]:
        return [*self.usage_chunk(), DONE]

    def failed(self, error: ApiError) -> Event:
        return Event(error.body())

    def usage(self) -> dict[str, Any]:
        """Return the token counts."""
        reasoning = [ids for ids, has in zip(self._token_ids, self._has_reasoning, strict=True) if has]
        counts = [num_reasoning_tokens(self.generation.texts, ids, self._make_reader()) for ids in reasoning]
        return self.generation.usage(sum(counts))

    def _choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for piece in self._pieces(index, choice):
            add_delta(message, piece)
        if not self._has_tool_calls[index]:
            message["content"] = message["content"] or ""
        for call in message.get("tool_calls", []):
            call.pop("index", None)
        body = {"index": index, "message": message, "logprobs": self._logprobs(choice.logprobs)}
        if self._request.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body | self._ending(index, choice)

    def _ending(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        """Return the finish and stop reasons. An answer that ends within a call's arguments counts as too long."""
        ending = _ending(choice, self._has_tool_calls[index])
        ending |= {"finish_reason": "length"} if self._readers[index].has_cut_call else {}
        if self._traced is not None:
            self._traced.end(index, ending["finish_reason"])
        return ending

    def _chunk(self, index: int, piece: dict[str, Any], choice: ChoiceText | None) -> dict[str, Any]:
        logprobs = self._logprobs(choice.logprobs) if choice and choice.logprobs else None
        body = {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": None}
        if choice is not None and self._request.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _pieces(self, index: int, choice: ChoiceText) -> list[dict[str, Any]]:
        reader = self._readers[index]
        self._token_ids[index] += choice.token_ids
        pieces = reader.read(choice.text, choice.token_ids)
        if choice.finish_reason is not None:
            pieces = pieces + reader.end(_is_cut(choice))
        self._has_tool_calls[index] |= any("tool_calls" in piece for piece in pieces)
        self._has_reasoning[index] |= any("reasoning_content" in piece for piece in pieces)
        if self._traced is not None:
            self._traced.add(index, pieces)
        return pieces

    def _logprobs(self, steps: list[Logprob]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self.generation.texts, steps, self._request.top_logprobs or 0)


class CompletionWriter:
    """Writes the answer to a request for completions of one or several prompts."""

    def __init__(self, generation: Generation, request: CompletionRequest, traced: TracedTexts | None = None) -> None:
        """`traced`: gets the answer for a trace."""
        self.generation = generation
        self._traced = traced
        self._request = request
        self._logprobs = [CompletionLogprobs(generation.texts, request.logprobs or 0) for _ in generation.choices]

    def body(self, choices: list[ChoiceText]) -> dict[str, Any]:
        bodies = [self._choice(index, self._without_unrequested_token(choice)) for index, choice in enumerate(choices)]
        return self.generation.info.body(bodies, usage=self.generation.usage())

    def begin(self) -> list[Event]:
        """Return a chunk with the echoed prompt for each choice of which the client has received nothing."""
        choices = self.generation.choices if self._request.echo else []
        new = [index for index, choice in enumerate(choices) if choice.is_new]
        return [self.generation.event([self._chunk(index, ChoiceText(self._echoed(index)))]) for index in new]

    def read(self, index: int, received: ChoiceText, remaining: ChoiceText) -> list[Event]:
        """Return the chunk for the next part of a choice."""
        remaining = self._without_unrequested_token(remaining)
        self._logprobs[index].read(received.logprobs)
        self._trace(index, received)
        self._trace(index, remaining)
        if not (remaining.text or remaining.token_ids or remaining.finish_reason):
            return []
        return [self.generation.event([self._chunk(index, remaining)])]

    def end(self) -> list[Event]:
        """Return the usage if the request asks for it, and [DONE]."""
        usage = self.generation.info.body([], usage=self.generation.usage())
        return [Event(usage), DONE] if self.generation.wants_usage else [DONE]

    def failed(self, error: ApiError) -> Event:
        return Event(error.body())

    def _without_unrequested_token(self, choice: ChoiceText) -> ChoiceText:
        """Return the output for the client. With max_tokens=0 the engine generates one token, which is dropped here."""
        if self._request.max_tokens != 0:
            return choice
        self.generation.num_generated = 0
        return ChoiceText(finish_reason=choice.finish_reason and "length")

    def _choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        request, prompt = self._request, index // self.generation.num_samples
        token_ids, done = self.generation.prompts[prompt], self.generation.dones[prompt]
        echoed = self._echoed(index)
        self._trace(index, choice)
        logprobs = None
        if request.logprobs is not None:
            parts = []
            if request.echo:
                parts.append(self._logprobs[index].read_prompt(echoed, token_ids, done.prompt_logprobs or []))
            parts.append(self._logprobs[index].read(choice.logprobs))
            logprobs = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        body = {"index": index, "text": echoed + choice.text, "logprobs": logprobs, **_ending(choice)}
        if request.prompt_logprobs is not None:
            body["prompt_logprobs"] = _prompt_logprobs(self.generation, prompt, request.prompt_logprobs)
        if request.return_token_ids:
            body |= {"prompt_token_ids": token_ids, "token_ids": choice.token_ids}
        return body

    def _chunk(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        logprobs = self._logprobs[index].read(choice.logprobs) if choice.logprobs else None
        body = {"index": index, "text": choice.text, "logprobs": logprobs, **_ending(choice)}
        if self._request.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _trace(self, index: int, choice: ChoiceText) -> None:
        if self._traced is not None:
            self._traced.add(index, [{"content": choice.text}])
            if choice.finish_reason is not None:
                self._traced.end(index, api_finish_reason(choice.finish_reason))

    def _echoed(self, index: int) -> str:
        """Return the prompt's text, with which a choice begins if the request sets `echo`; else an empty text."""
        if not self._request.echo:
            return ""
        prompt = self._request.prompts[index // self.generation.num_samples]
        return prompt if isinstance(prompt, str) else self.generation.texts.joined(prompt)


def _is_cut(choice: ChoiceText) -> bool:
    """Return whether something other than the model's EOS ended an answer: its length, a stop text or a ban."""
    return choice.finish_reason in ("length", "no_token") or isinstance(choice.stop_reason, str)


def _ending(choice: ChoiceText, has_tool_calls: bool = False) -> dict[str, Any]:
    """Return the finish and stop reasons of a choice; null while it continues."""
    if choice.finish_reason is None:
        return {"finish_reason": None, "stop_reason": None}
    reason = api_finish_reason(choice.finish_reason, has_tool_calls)
    return {"finish_reason": reason, "stop_reason": api_stop_reason(choice.finish_reason, choice.stop_reason)}


def _prompt_logprobs(generation: Generation, prompt: int, num_top: int) -> list[dict[str, Any] | None]:
    return prompt_logprobs(generation.texts, generation.dones[prompt].prompt_logprobs or [], num_top)


def num_reasoning_tokens(texts: TokenTexts, token_ids: Sequence[int], reader: MessageReader) -> int:
    """Return the number of tokens from the first to the last reasoning token. `reader` has read nothing yet."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    written = [reader.read(utf8.decode(texts.written(token_id)), [token_id]) for token_id in token_ids]
    written[-1] += reader.end()
    reasoning_indices = [i for i, pieces in enumerate(written) if any("reasoning_content" in piece for piece in pieces)]
    return reasoning_indices[-1] - reasoning_indices[0] + 1 if reasoning_indices else 0
