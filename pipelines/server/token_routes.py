"""The routes without generation: embeddings and scores, token counts, tokenize and detokenize."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from models.tokenizers import Tokenizer
from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.replicas.engine_process.frames import SubmitPooled
from pipelines.server.api import message_requests, response_requests
from pipelines.server.api.conversation import Chat
from pipelines.server.api.embeddings import IN_ENGINE, EmbeddingRequest, embedding_body, embedding_refusal, encode_input
from pipelines.server.api.errors import ApiError, bad_request, too_long
from pipelines.server.api.message_requests import CountTokensRequest
from pipelines.server.api.parsing import check_request
from pipelines.server.api.ranking import RerankRequest, ScoreRequest, cosine_similarities, rerank_body, score_body
from pipelines.server.api.requests import Body, ChatRequest, Json, Message, Prompt, TokenIds, Tool
from pipelines.server.api.response_requests import CountInputRequest
from pipelines.server.api.settings import cache_salt
from pipelines.server.engine_session import EngineSession
from pipelines.server.service import Result


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
    try:
        prompt = await chat.encode(body.chat_request())
    except ApiError as error:
        raise error.renamed(message_requests.NAMES) from error
    session.record.warnings += prompt.warnings
    return {"input_tokens": len(prompt.token_ids)}


async def count_input_tokens(body: CountInputRequest, session: EngineSession, chat: Chat) -> Result:
    """Count the tokens of a conversation's prompt, in the format of OpenAI's responses."""
    try:
        prompt = await chat.encode(body.chat())
    except ApiError as error:
        raise error.renamed(response_requests.NAMES) from error
    session.record.warnings += prompt.warnings
    return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}


async def embeddings(body: EmbeddingRequest, session: EngineSession, chat: Chat) -> Result:
    """Compute embeddings of texts."""
    vectors, num_tokens = await _vectors(body.inputs, session, chat)
    return embedding_body(body, session.context.model, session.info.fingerprint, vectors, num_tokens)


async def rerank(body: RerankRequest, session: EngineSession, chat: Chat) -> Result:
    """Sort documents by the cosine similarity of their vectors to the query's, in the format of vLLM's API."""
    scores, num_tokens = await _scores(body, session, chat, "documents")
    return rerank_body(body, session.context, scores, num_tokens)


async def score(body: ScoreRequest, session: EngineSession, chat: Chat) -> Result:
    """Return the cosine similarity of the vectors of pairs of texts, in the format of vLLM's API."""
    scores, num_tokens = await _scores(body, session, chat, "queries or documents")
    return score_body(session.context, scores, num_tokens)


async def _scores(
    body: RerankRequest | ScoreRequest, session: EngineSession, chat: Chat, param: str
) -> tuple[list[float], int]:
    """Return the score of each pair, and the number of tokens of all texts."""
    texts, pairs = body.scored_texts()
    if chat.tokenizer is None:
        raise bad_request("this server has no tokenizer, which texts need: start it with model.tokenizer", param)
    try:
        vectors, num_tokens = await _vectors(texts, session, chat)
    except ApiError as error:
        raise error.renamed({"input": param}) from error
    return await asyncio.to_thread(cosine_similarities, vectors, pairs), num_tokens


async def _vectors(inputs: Sequence[Prompt], session: EngineSession, chat: Chat) -> tuple[list[list[float]], int]:
    """Return the vector of each input, and the number of tokens of all inputs."""
    model = session.info
    if not model.embeds:
        raise bad_request("this model continues texts and gives no vectors of them: ask an embedding model", "model")
    prompts = await encode_prompts(chat, inputs, lambda text: encode_input(model, chat.tokenizer, text))
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
    return vectors, sum(map(len, prompts))


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
