"""The routes that read a body: each from its bytes to the engine and back."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from models.tokenizers import Tokenizer
from pipelines.api.errors import bad_request
from pipelines.api.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Message,
    Name,
    Shape,
    TokenIds,
    Tool,
    check_request,
    parse_request,
)
from pipelines.serve.chat import Chat
from pipelines.serve.completions import ChatAnswer, CompletionAnswer
from pipelines.serve.embeddings import EmbeddingAnswer, encode_input
from pipelines.serve.exchange import Exchange, loaded
from pipelines.serve.generation import Event
from pipelines.serve.openapi import takes
from pipelines.serve.resumption import HEADER
from pipelines.serve.service import Result, Service
from pipelines.serve.stream import DONE, event
from pipelines.serve.submitted import Call


class TokenizeRequest(Shape):
    """The body of POST /tokenize: a prompt, or messages."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    add_special_tokens: bool | None = None
    """Whether a prompt gets the tokenizer's BOS and the like: it does where nothing is said."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Shape):
    """The body of POST /detokenize."""

    model: Name | None = None
    tokens: TokenIds


KINDS: list[type[Shape]] = [ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest]
"""The bodies that these routes take."""


def add_chat(app: FastAPI, service: Service, chat: Chat) -> None:
    """Add the route of conversations."""

    @app.post("/v1/chat/completions", **takes(ChatRequest, 412))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = parse_request(ChatRequest, await request.body())

        async def work(exchange: Exchange) -> Result:
            prompt = await chat.encode(body)
            call = call_of(request, exchange, chat, "chatcmpl")
            answer = ChatAnswer(call, body, prompt.token_ids, prompt.reader, prompt.settings)
            await answer.accepted()
            return written(answer.events()) if body.stream else await answer.body()

        return await service.respond(request, body.model, body.n or 1, bool(body.stream), work)


def add_completions(app: FastAPI, service: Service, chat: Chat) -> None:
    """Add the route of prompts."""

    @app.post("/v1/completions", **takes(CompletionRequest, 412))
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        body = parse_request(CompletionRequest, await request.body())

        async def work(exchange: Exchange) -> Result:
            special = body.add_special_tokens is not False
            prompts = [
                await asyncio.to_thread(_encoded, chat.tokenizer, each, special) if isinstance(each, str) else each
                for each in body.prompts
            ]
            answer = CompletionAnswer(call_of(request, exchange, chat, "cmpl"), body, prompts)
            await answer.accepted()
            return written(answer.events()) if body.stream else await answer.body()

        num_sequences = len(body.prompts) * (body.n or 1)
        return await service.respond(request, body.model, num_sequences, bool(body.stream), work)


def add_embeddings(app: FastAPI, service: Service, chat: Chat) -> None:
    """Add the route of vectors."""

    @app.post("/v1/embeddings", **takes(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        """Give the vectors of texts."""
        body = parse_request(EmbeddingRequest, await request.body())

        async def work(exchange: Exchange) -> Result:
            prompts = [
                await asyncio.to_thread(encode_input, exchange.info, chat.tokenizer, each)
                if isinstance(each, str)
                else each
                for each in body.inputs
            ]
            answer = EmbeddingAnswer(call_of(request, exchange, chat, "embd"), body, prompts)
            await answer.accepted()
            return await answer.body()

        return await service.respond(request, body.model, len(body.inputs), False, work)


def add_tokens(app: FastAPI, service: Service, chat: Chat) -> None:
    """Add the routes of the tokenizer, in vLLM's shape."""

    @app.post("/tokenize", **takes(TokenizeRequest))
    async def tokenize(request: Request) -> JSONResponse:
        """Return the token ids of a prompt or of a conversation."""
        body = parse_request(TokenizeRequest, await request.body())
        service.adapter_of(body.model or service.model_name)
        length = loaded(service.engine).context_length
        tokens = await _tokens(chat, body, service.model_name)
        texts = None
        if body.return_token_strs:
            tokenizer = _tokenizer(chat.tokenizer, "return_token_strs")
            texts = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": texts})

    @app.post("/detokenize", **takes(DetokenizeRequest))
    async def detokenize(request: Request) -> JSONResponse:
        """Return the text of token ids."""
        body = parse_request(DetokenizeRequest, await request.body())
        service.adapter_of(body.model or service.model_name)
        tokenizer, vocab_size = _tokenizer(chat.tokenizer, "tokens"), loaded(service.engine).vocab_size
        if wrong := [token for token in body.tokens if token >= min(vocab_size, tokenizer.size)]:
            raise bad_request(f"tokens has {wrong[0]}, and the vocabulary ends before it: leave it out", "tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})


async def _tokens(chat: Chat, body: TokenizeRequest, model: str) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        if body.tools or body.chat_template_kwargs:
            raise bad_request("tools and chat_template_kwargs go with messages: leave them out", "tools")
        return await asyncio.to_thread(_encoded, chat.tokenizer, body.prompt, body.add_special_tokens is not False)
    fields = body.model_dump(exclude_none=True, by_alias=True)
    names = ("messages", "tools", "chat_template_kwargs", "add_special_tokens")
    as_chat = check_request(ChatRequest, {"model": model} | {name: fields[name] for name in names if name in fields})
    return (await chat.encode(as_chat)).token_ids


def call_of(request: Request, exchange: Exchange, chat: Chat, prefix: str) -> Call:
    """Return what a request is beside its body. prefix: of the answer's id."""
    record = exchange.record
    return Call(
        exchange,
        chat.tokenizer,
        f"{prefix}-{record.id}",
        record.model or "",
        exchange.adapter,
        record.key,
        request.headers.get(HEADER),
    )


def _tokenizer(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    if tokenizer is None:
        raise bad_request("this server has no tokenizer: give token ids", param)
    return tokenizer


def _encoded(tokenizer: Tokenizer | None, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a prompt, as task=predict makes them."""
    tokenizer = _tokenizer(tokenizer, "prompt")
    token_ids = tokenizer.encode(text, add_special_tokens)
    if not token_ids and add_special_tokens and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]  # something to begin with
    return token_ids


async def written(events: AsyncGenerator[Event], ends: bool = True) -> AsyncIterator[bytes]:
    """Yield events as they are sent. ends: whether one more says that all have come."""
    async with aclosing(events):
        async for each in events:
            yield event(msgspec.json.encode(each.data), each.name, each.id)
    if ends:
        yield DONE
