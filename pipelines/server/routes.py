"""The routes that read a body, in one table. Each route converts its request for the engine and returns the result."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import Field

from models.tokenizers import Tokenizer
from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.replicas.engine_process.frames import Submit, SubmitPooled
from pipelines.server.api import messages, responses
from pipelines.server.api.answer_shapes import (
    AnswerShape,
    ChatAnswer,
    CompletionAnswer,
    Embeddings,
    InputTokens,
    MessageAnswer,
    ResponseAnswer,
    Text,
    Tokens,
)
from pipelines.server.api.answers import ChoiceText
from pipelines.server.api.conversation import Chat
from pipelines.server.api.embeddings import IN_ENGINE, EmbeddingRequest, embedding_body, embedding_refusal, encode_input
from pipelines.server.api.errors import ApiError, bad_request, too_long
from pipelines.server.api.generation import Generation
from pipelines.server.api.messages import CountTokensRequest, MessagesRequest, MessageWriter
from pipelines.server.api.parsing import check_request, parse_request
from pipelines.server.api.requests import Body, ChatRequest, CompletionRequest, Json, Message, Prompt, TokenIds, Tool
from pipelines.server.api.responses import ResponseRequest, ResponseWriter
from pipelines.server.api.resumption import HEADER
from pipelines.server.api.settings import cache_salt
from pipelines.server.api.writers import ChatWriter, CompletionWriter, Writer
from pipelines.server.engine_session import EngineSession
from pipelines.server.openapi import takes
from pipelines.server.service import EngineResponse, Result, Service, Stream, timeout_s
from pipelines.server.stream import written


class TokenizeRequest(Body):
    """A prompt or a conversation to tokenize."""

    path = "/tokenize"
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    chat_template_kwargs: Annotated[Json, Field(max_length=32)] | None = None
    add_special_tokens: bool | None = None
    """Whether special tokens such as BOS are added to a prompt. The default is true."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Token ids to decode."""

    path = "/detokenize"
    tokens: TokenIds


async def chat_completions(body: ChatRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate the next message of a conversation."""
    writer = await _chat(body, session, chat)
    return await continued(session, writer.generation, writer, bool(body.stream))


async def completions(body: CompletionRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate continuations of prompts."""
    special = body.add_special_tokens is not False
    most = session.info.context_length
    prompts = await _encode_prompts(chat, body.prompts, lambda text: _encoded(chat.tokenizer, text, special, most))
    generation = Generation(body, prompts, session.info, session.context, chat.tokenizer)
    return await continued(session, generation, CompletionWriter(generation, body), bool(body.stream))


async def respond(body: ResponseRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate a response to a conversation. The input contains the whole conversation as items."""
    try:
        writer = await _chat(body.chat(), session, chat, has_ids=False)
        response = ResponseWriter(body, session.record.id, writer)
        return await continued(session, writer.generation, response, bool(body.stream))
    except ApiError as error:
        raise error.renamed(responses.NAMES) from error


async def message(body: MessagesRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate the next message of a conversation, in the format of Anthropic's API."""
    try:
        writer = await _chat(body.chat_request(), session, chat, has_ids=False)
        return await continued(session, writer.generation, MessageWriter(writer), bool(body.stream))
    except ApiError as error:
        raise error.renamed(messages.NAMES) from error


async def count_tokens(body: CountTokensRequest, session: EngineSession, chat: Chat) -> Result:
    """Count the tokens of a conversation's prompt, in the format of Anthropic's API."""
    try:
        return {"input_tokens": len((await chat.encode(body.chat_request())).token_ids)}
    except ApiError as error:
        raise error.renamed(messages.NAMES) from error


async def embeddings(body: EmbeddingRequest, session: EngineSession, chat: Chat) -> Result:
    """Compute embeddings of texts."""
    model = session.info
    if not model.embeds:
        raise bad_request("this model continues texts and gives no vectors of them: ask an embedding model", "model")
    prompts = await _encode_prompts(chat, body.inputs, lambda text: encode_input(model, chat.tokenizer, text))
    salt = cache_salt(session.context.key, None)
    vectors: list[list[float]] = []
    for first in range(0, len(prompts), IN_ENGINE):
        part = prompts[first : first + IN_ENGINE]
        session.submit([SubmitPooled(0, prompt, cache_salt=salt, **session.named._asdict()) for prompt in part])
        try:
            await session.accepted()
        except EngineRefused as refused:
            raise embedding_refusal(refused.message) from refused
        async for _ in session.deltas():
            pass
        vectors += [done.vector or [] for _, done in sorted(session.dones.items())]
    return embedding_body(body, session.context.model, model.fingerprint, vectors, sum(map(len, prompts)))


async def tokenize(body: TokenizeRequest, session: EngineSession, chat: Chat) -> Result:
    """Return the token ids of a prompt or of a conversation, in the format of vLLM's API."""
    tokens = await _tokens(body, session.context.model, chat)
    texts = None
    if body.return_token_strs:
        decode = _tokenizer(chat.tokenizer, "return_token_strs").decode
        texts = await asyncio.to_thread(lambda: [decode([token], skip_special_tokens=False) for token in tokens])
    length = session.info.context_length
    return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": texts}


async def detokenize(body: DetokenizeRequest, session: EngineSession, chat: Chat) -> Result:
    """Return the text of token ids."""
    tokenizer, vocab_size = _tokenizer(chat.tokenizer, "tokens"), session.info.vocab_size
    if wrong := [token for token in body.tokens if token >= min(vocab_size, tokenizer.size)]:
        raise bad_request(f"tokens has {wrong[0]}, and the vocabulary ends before it: leave it out", "tokens")
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)}


class Route(NamedTuple):
    """A route that reads a body."""

    kind: type[Body]
    answer: Callable[[Any, EngineSession, Chat], Coroutine[Any, Any, Result]]
    shape: type[AnswerShape]
    """Shape of a response that is not streamed."""
    prefix: str = ""
    """Prefix of the answer's id."""
    num_prompts: Callable[[Any], int] = lambda body: 1
    has_samples: bool = False
    """Whether a prompt has several samples, as the body or the server's settings say. If false: one."""
    statuses: tuple[int, ...] = ()
    """Further statuses of responses."""

    def num_sequences(self, body: Any, decode: Mapping[str, Any]) -> int:
        """Return the number of sequences of a request. `decode`: the server's defaults."""
        if not self.has_samples:
            return self.num_prompts(body)
        num_samples = getattr(body, "n", None) or decode.get("n") or 1
        return self.num_prompts(body) * max(
            num_samples, decode.get("num_return_sequences") or 1, decode.get("num_beams") or 1
        )


ROUTES = {
    route.kind.path: route
    for route in (
        Route(ChatRequest, chat_completions, ChatAnswer, "chatcmpl-", has_samples=True, statuses=(412,)),
        Route(CompletionRequest, completions, CompletionAnswer, "cmpl-", lambda body: len(body.prompts), True, (412,)),
        Route(ResponseRequest, respond, ResponseAnswer, "resp_"),
        Route(MessagesRequest, message, MessageAnswer, "msg_"),
        Route(CountTokensRequest, count_tokens, InputTokens),
        Route(EmbeddingRequest, embeddings, Embeddings, "embd-", lambda body: min(len(body.inputs), IN_ENGINE)),
        Route(TokenizeRequest, tokenize, Tokens),
        Route(DetokenizeRequest, detokenize, Text),
    )
}


def add_routes(app: FastAPI, service: Service, chat: Chat) -> None:
    for path, route in ROUTES.items():
        app.post(
            path,
            name=route.answer.__name__,
            description=route.answer.__doc__,
            **takes(route.kind, route.shape, *route.statuses),
        )(_handler(route, service, chat))


def _handler(route: Route, service: Service, chat: Chat) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def handle(request: Request) -> Response:
        body: Any = parse_request(route.kind, await request.body())
        session = service.session(request.state.record, body, route.prefix, request.headers.get(HEADER))
        seconds = timeout_s(request.headers, service.config.request_timeout_s, bool(getattr(body, "stream", False)))
        return EngineResponse(
            service,
            session,
            route.num_sequences(body, session.info.decode),
            seconds,
            lambda engine_session: route.answer(body, engine_session, chat),
        )

    return handle


async def continued(session: EngineSession, generation: Generation, writer: Writer, is_stream: bool) -> Result:
    """Return the response, or its event stream once the engine has accepted the request. Raises ApiError."""
    submits = zip(generation.prompts, generation.settings, strict=True)
    session.submit([Submit(0, *submit, **session.named._asdict(), streams=is_stream) for submit in submits])
    generation.dones = session.dones
    try:
        await session.accepted()
    except EngineRefused as refused:
        raise generation.refused(refused.message) from refused
    if is_stream:
        return Stream(_events(session, generation, writer), writer.failed)
    choices = [ChoiceText() for _ in generation.choices]
    async for prompt, delta in session.deltas():
        index, received, remaining = generation.take(prompt, delta)
        choices[index].add(received)
        choices[index].add(remaining)
    return writer.body(choices)


async def _events(session: EngineSession, generation: Generation, writer: Writer) -> AsyncGenerator[bytes]:
    if begun := writer.begin():
        yield written(begun)
    async with aclosing(session.deltas()) as deltas:
        async for prompt, delta in deltas:
            if events := writer.read(*generation.take(prompt, delta)):
                yield written(events)
    yield written(writer.end())


async def _chat(body: ChatRequest, session: EngineSession, chat: Chat, has_ids: bool = True) -> ChatWriter:
    """Return the writer of the answer to a conversation. Raises ApiError.

    `has_ids`: whether streams of this kind have event ids, so that a client can resume them.
    """
    if session.context.last_event_id is not None and not has_ids:
        raise bad_request(f"streams of this kind have no ids to go on from: leave {HEADER} out", HEADER)
    prompt = await chat.encode(body, session.info.context_length)
    generation = Generation(body, [prompt.token_ids], session.info, session.context, chat.tokenizer, prompt.settings)
    return ChatWriter(generation, body, prompt.reader)


async def _tokens(body: TokenizeRequest, model: str, chat: Chat) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        if body.tools or body.chat_template_kwargs:
            raise bad_request("tools and chat_template_kwargs go with messages: leave them out", "tools")
        special = body.add_special_tokens is not False
        return await chat.in_thread(len(body.prompt), _encoded, chat.tokenizer, body.prompt, special)
    fields = body.model_dump(exclude_none=True, by_alias=True)
    names = ("messages", "tools", "chat_template_kwargs", "add_special_tokens")
    as_chat = check_request(ChatRequest, {"model": model} | {name: fields[name] for name in names if name in fields})
    return (await chat.encode(as_chat)).token_ids


async def _encode_prompts(chat: Chat, prompts: Sequence[Prompt], encode: Callable[[str], list[int]]) -> list[list[int]]:
    return [
        await chat.in_thread(len(prompt), encode, prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]


def _tokenizer(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    if tokenizer is None:
        raise bad_request("this server has no tokenizer: give token ids", param)
    return tokenizer


def _encoded(
    tokenizer: Tokenizer | None, text: str, add_special_tokens: bool, max_tokens: int | None = None
) -> list[int]:
    """Return the token ids of a prompt, equal to those of task=predict.

    Raises ApiError if the text certainly has more than `max_tokens` tokens.
    """
    tokenizer = _tokenizer(tokenizer, "prompt")
    if max_tokens is not None and (least := tokenizer.least_tokens(text)) > max_tokens:
        raise too_long(f"at least {least}", max_tokens, "prompt")
    token_ids = tokenizer.encode(text, add_special_tokens)
    if not token_ids and add_special_tokens and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]  # an empty prompt begins with BOS
    return token_ids
