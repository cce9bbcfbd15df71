"""The routes that generate: chat completions, completions, responses and messages."""

from uuid import uuid4

from pipelines.server.api import message_requests, response_requests
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import bad_request, not_allowed, renamed_errors
from pipelines.server.api.generation import Generation
from pipelines.server.api.messages import MessageWriter
from pipelines.server.api.requests import ChatRequest, CompletionRequest
from pipelines.server.api.responses import ResponseWriter
from pipelines.server.api.resumption import HEADER
from pipelines.server.api.writers import ChatWriter, CompletionWriter
from pipelines.server.continuation import continued
from pipelines.server.engine_response import Result
from pipelines.server.engine_session import EngineSession
from pipelines.server.responses.history import input_items, with_history
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
    if (traced := session.record.texts) is not None:
        texts = [prompt if isinstance(prompt, str) else generation.texts.joined(prompt) for prompt in body.prompts]
        traced.ask([{"role": "user", "content": text} for text in texts])
    return await continued(session, generation, CompletionWriter(generation, body, traced), bool(body.stream))


async def respond(body: response_requests.ResponseRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate a response to a conversation: the items of `previous_response_id`, then the input."""
    if body.background:
        raise not_allowed("background", True, "it needs serve.response_store, and lines of batches cannot have it")
    writer = await response_writer(body, session, chat)

    async def store() -> None:
        if session.response_store is None or not writer.is_stored:
            return
        items = input_items(writer.request.items, writer.ended["id"])
        if not await session.response_store.save(session.context.key, writer.ended, items):
            writer.ended["store"] = False
            session.record.warnings.append("store is not used: the response cannot be stored")

    with renamed_errors(response_requests.NAMES):
        return await continued(session, writer.generation, writer, bool(body.stream), store)


async def response_writer(
    body: response_requests.ResponseRequest, session: EngineSession, chat: Chat
) -> ResponseWriter:
    """Return the writer of a response, whose prompt is encoded. Raises ApiError."""
    with renamed_errors(response_requests.NAMES):
        body = await with_history(body, session.response_store, session.context.key)
        is_stored = session.response_store is not None and body.store is not False
        # A stored response has an id that the client cannot choose.
        id = uuid4().hex if is_stored else session.record.id
        writer = await _chat(body.chat(), session, chat, has_ids=False, has_instructions=bool(body.instructions))
        return ResponseWriter(body, id, writer, is_stored)


async def message(body: message_requests.MessagesRequest, session: EngineSession, chat: Chat) -> Result:
    """Generate the next message of a conversation, in the format of Anthropic's API."""
    with renamed_errors(message_requests.NAMES):
        request, has_system = body.chat_request(), bool(body.system)
        writer = await _chat(request, session, chat, has_ids=False, cuts_length=True, has_instructions=has_system)
        return await continued(session, writer.generation, MessageWriter(writer), bool(body.stream))


async def _chat(
    body: ChatRequest,
    session: EngineSession,
    chat: Chat,
    has_ids: bool = True,
    cuts_length: bool = False,
    has_instructions: bool = False,
) -> ChatWriter:
    """Return the writer of the answer to a conversation. Raises ApiError.

    `has_ids`: whether streams of this kind have event ids, so that a client can resume them. `cuts_length`: whether a
    length that does not fit is reduced. Agents give the largest length of a hosted model in every request.
    `has_instructions`: as for `TracedTexts.ask`.
    """
    if session.context.last_event_id is not None and not has_ids:
        raise bad_request(f"streams of this route have no event ids and cannot be resumed: leave {HEADER} out", HEADER)
    if (traced := session.record.texts) is not None:
        traced.ask(body.conversation(), has_instructions)
    prompt = await chat.encode(body, session.info.context_length)
    session.record.warnings += prompt.warnings
    if cuts_length:
        body = _cut(body, session, len(prompt.token_ids))
    generation = Generation(body, [prompt.token_ids], session.info, session.context, chat.tokenizer, prompt.settings)
    return ChatWriter(generation, body, prompt.reader, traced)


def _cut(body: ChatRequest, session: EngineSession, num_prompt: int) -> ChatRequest:
    """Return the request with a length that fits behind the prompt. A reduction causes a warning."""
    room = min(session.info.context_length, session.info.num_cache_tokens) - num_prompt
    length = body.max_completion_tokens or 0
    if room < 1 or length <= room:
        return body
    session.record.warnings.append(f"max_tokens={length} is reduced to fit into the model's context")
    return body.model_copy(update={"max_completion_tokens": room})
