"""The routes that only tokenize: token counts, tokenize and detokenize."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from models.tokenizers import Tokenizer
from pipelines.server.api import message_requests, response_requests
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import bad_request, renamed_errors, too_long
from pipelines.server.api.message_requests import CountTokensRequest
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import Body, ChatRequest, Json, Message, Prompt, TokenIds, Tool
from pipelines.server.api.response_requests import CountInputRequest
from pipelines.server.engine_response import Result
from pipelines.server.engine_session import EngineSession
from pipelines.server.responses.history import with_history


class TokenizeRequest(Body):
    """A prompt or a conversation to tokenize."""

    path = "/tokenize"
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    chat_template_kwargs: Annotated[Json, Field(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Whether special tokens such as BOS are added to a prompt. The default is true."""
    return_token_strs: bool | None = None


_OF_MESSAGES = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class DetokenizeRequest(Body):
    """Token ids to decode."""

    path = "/detokenize"
    tokens: TokenIds


async def count_tokens(body: CountTokensRequest, session: EngineSession, chat: Chat) -> Result:
    """Count the tokens of a conversation's prompt, in the format of Anthropic's API."""
    with renamed_errors(message_requests.NAMES):
        prompt = await chat.encode(body.chat_request())
    session.record.warnings += prompt.warnings
    return {"input_tokens": len(prompt.token_ids)}


async def count_input_tokens(body: CountInputRequest, session: EngineSession, chat: Chat) -> Result:
    """Count the tokens of a conversation's prompt, in the format of OpenAI's responses."""
    with renamed_errors(response_requests.NAMES):
        body = await with_history(body, session.response_store, session.context.key)
        prompt = await chat.encode(body.chat())
    session.record.warnings += prompt.warnings
    return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}


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


async def _tokens(body: TokenizeRequest, model: str, chat: Chat) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        for name in _OF_MESSAGES:
            if getattr(body, name):
                raise bad_request(f"{name} goes with messages: leave it out", name)
        special = body.add_special_tokens is not False
        return await chat.in_thread(len(body.prompt), encode_text, chat.tokenizer, body.prompt, special)
    fields = body.model_dump(exclude_none=True, by_alias=True)
    names = ("messages", "add_special_tokens", *_OF_MESSAGES)
    as_chat = check_request(ChatRequest, {"model": model} | {name: fields[name] for name in names if name in fields})
    return (await chat.encode(as_chat)).token_ids


async def encode_prompts(chat: Chat, prompts: Sequence[Prompt], encode: Callable[[str], list[int]]) -> list[list[int]]:
    return [
        await chat.in_thread(len(prompt), encode, prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]


def encode_text(
    tokenizer: Tokenizer | None, text: str, add_special_tokens: bool, max_tokens: int | None = None
) -> list[int]:
    """Return the same token ids as task=predict for this prompt.

    Raises ApiError, before encoding, if the text must have more than `max_tokens` tokens.
    """
    tokenizer = _tokenizer(tokenizer, "prompt")
    if max_tokens is not None and (least := tokenizer.least_tokens(text)) > max_tokens:
        raise too_long(f"at least {least}", max_tokens, "prompt")
    token_ids = tokenizer.encode(text, add_special_tokens)
    if not token_ids and add_special_tokens and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]  # an empty prompt begins with BOS
    return token_ids


def _tokenizer(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    if tokenizer is None:
        raise bad_request("this server has no tokenizer: give token ids", param)
    return tokenizer
