"""The table of the routes that read a body, and their registration."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import Response

from pipelines.server.api.answer_shapes import (
    ChatAnswer,
    CompletionAnswer,
    InputTokens,
    MessageAnswer,
    ResponseAnswer,
    ResponseInputTokens,
    Text,
    Tokens,
)
from pipelines.server.api.conversation import Chat
from pipelines.server.api.message_requests import CountTokensRequest, MessagesRequest
from pipelines.server.api.parsing import parse_request
from pipelines.server.api.requests import ChatRequest, CompletionRequest
from pipelines.server.api.response_requests import CountInputRequest, ResponseRequest
from pipelines.server.api.resumption import HEADER
from pipelines.server.engine_response import EngineResponse, timeout_s
from pipelines.server.generation_routes import chat_completions, completions, message, respond
from pipelines.server.openapi import takes
from pipelines.server.pooled_routes import POOLED_ROUTES
from pipelines.server.responses.background import KeptResponses
from pipelines.server.route import Route
from pipelines.server.service import Service
from pipelines.server.token_routes import (
    DetokenizeRequest,
    TokenizeRequest,
    count_input_tokens,
    count_tokens,
    detokenize,
    tokenize,
)

ROUTES = {
    path: route
    for route in (
        Route(ChatRequest, chat_completions, ChatAnswer, "chatcmpl-", has_samples=True, statuses=(412,)),
        Route(CompletionRequest, completions, CompletionAnswer, "cmpl-", lambda body: len(body.prompts), True, (412,)),
        Route(ResponseRequest, respond, ResponseAnswer, "resp_"),
        Route(MessagesRequest, message, MessageAnswer, "msg_"),
        Route(CountTokensRequest, count_tokens, InputTokens),
        Route(CountInputRequest, count_input_tokens, ResponseInputTokens),
        *POOLED_ROUTES,
        Route(TokenizeRequest, tokenize, Tokens),
        Route(DetokenizeRequest, detokenize, Text),
    )
    for path in (route.kind.path, *route.kind.aliases)
}


def add_routes(app: FastAPI, service: Service, chat: Chat, kept: KeptResponses | None) -> None:
    """`kept`: runs background responses; None: they are refused."""
    for path, route in ROUTES.items():
        app.post(
            path,
            name=route.answer.__name__,
            description=route.answer.__doc__,
            **takes(route.kind, route.shape, *route.statuses),
        )(_handler(route, service, chat, kept))


def _handler(
    route: Route, service: Service, chat: Chat, kept: KeptResponses | None
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def handle(request: Request) -> Response:
        body: Any = parse_request(route.kind, await request.body())
        is_background = bool(getattr(body, "background", False))
        has_own_limit = is_background or bool(getattr(body, "stream", False))
        seconds = timeout_s(request.headers, service.config.request_timeout_s, has_own_limit)
        session = service.session(request.state.record, body, route.prefix, request.headers.get(HEADER))
        try:
            if is_background and kept is not None:
                return await kept.start(session, body, seconds)
            num_sequences = route.num_sequences(body, session.info.decode)
            return EngineResponse(
                service,
                session,
                min(num_sequences, session.max_part) if route.in_parts else num_sequences,
                seconds,
                lambda engine_session: route.answer(body, engine_session, chat),
            )
        except BaseException:
            session.end()
            raise

    return handle
