"""The routes that generate: chat completions, completions, responses and messages."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.replicas.engine_process.frames import Submit
from pipelines.server.api import messages, responses
from pipelines.server.api.answers import ChoiceText
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import ApiError, bad_request
from pipelines.server.api.generation import Generation
from pipelines.server.api.requests import ChatRequest, CompletionRequest
from pipelines.server.api.resumption import HEADER
from pipelines.server.api.writers import ChatWriter, CompletionWriter, Writer
from pipelines.server.engine_session import EngineSession
from pipelines.server.service import Result, Stream
from pipelines.server.stream import written
from pipelines.server.token_routes import encode_prompts, encode_text


async def chat_completions(body: ChatRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate the next message of a conversation."""
    writer = await _chat(body, session, chat)
    return await continued(session, writer.generation, writer, bool(body.stream))


async def completions(body: CompletionRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate continuations of prompts."""
    special = body.add_special_tokens is not False
    most = session.info.context_length
    prompts = await encode_prompts(chat, body.prompts, lambda text: encode_text(chat.tokenizer, text, special, most))
    generation = Generation(body, prompts, session.info, session.context, chat.tokenizer)
    return await continued(session, generation, CompletionWriter(generation, body), bool(body.stream))


async def respond(body: responses.ResponseRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate a response to a conversation. The input contains the whole conversation as items."""
    try:
        writer = await _chat(body.chat(), session, chat, has_ids=False)
        response = responses.ResponseWriter(body, session.record.id, writer)
        return await continued(session, writer.generation, response, bool(body.stream))
    except ApiError as error:
        raise error.renamed(responses.NAMES) from error


async def message(body: messages.MessagesRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate the next message of a conversation, in the format of Anthropic's API."""
    try:
        writer = await _chat(body.chat_request(), session, chat, has_ids=False)
        return await continued(session, writer.generation, messages.MessageWriter(writer), bool(body.stream))
    except ApiError as error:
        raise error.renamed(messages.NAMES) from error


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
        raise bad_request(f"streams of this route have no event ids and cannot be resumed: leave {HEADER} out", HEADER)
    prompt = await chat.encode(body, session.info.context_length)
    generation = Generation(body, [prompt.token_ids], session.info, session.context, chat.tokenizer, prompt.settings)
    return ChatWriter(generation, body, prompt.reader)
