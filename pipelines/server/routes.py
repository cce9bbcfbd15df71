"""The table of the routes that read a body, and their registration."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import Response

from pipelines.server.api.answer_shapes import (
    AnswerShape,
    ChatAnswer,
    Classes,
    CompletionAnswer,
    Embeddings,
    InputTokens,
    MessageAnswer,
    PooledOutputs,
    Ranking,
    ResponseAnswer,
    ResponseInputTokens,
    Scores,
    Text,
    Tokens,
)
from pipelines.server.api.conversation import Chat
from pipelines.server.api.message_requests import CountTokensRequest, MessagesRequest
from pipelines.server.api.parsing import parse_request
from pipelines.server.api.pooling import IN_ENGINE, ClassifyRequest, EmbeddingRequest, PooledInputs, PoolingRequest
from pipelines.server.api.ranking import PairsRequest, RerankRequest, ScoreRequest
from pipelines.server.api.requests import Body, ChatRequest, CompletionRequest
from pipelines.server.api.response_requests import CountInputRequest, ResponseRequest
from pipelines.server.api.resumption import HEADER
from pipelines.server.engine_session import EngineSession
from pipelines.server.generation_routes import chat_completions, completions, message, respond
from pipelines.server.openapi import takes
from pipelines.server.pooled_routes import classify, embeddings, pooling, rerank, score
from pipelines.server.responses.background import KeptResponses
from pipelines.server.service import EngineResponse, Result, Service, timeout_s
from pipelines.server.token_routes import (
    DetokenizeRequest,
    TokenizeRequest,
    count_input_tokens,
    count_tokens,
    detokenize,
    tokenize,
)


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
    """Whether the body and the server's settings can ask for several samples of a prompt. False: one sample."""
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


def _in_engine(body: EmbeddingRequest | PooledInputs | PairsRequest) -> int:
    return min(body.num_prompts, IN_ENGINE)


ROUTES = {
    path: route
    for route in (
        Route(ChatRequest, chat_completions, ChatAnswer, "chatcmpl-", has_samples=True, statuses=(412,)),
        Route(CompletionRequest, completions, CompletionAnswer, "cmpl-", lambda body: len(body.prompts), True, (412,)),
        Route(ResponseRequest, respond, ResponseAnswer, "resp_"),
        Route(MessagesRequest, message, MessageAnswer, "msg_"),
        Route(CountTokensRequest, count_tokens, InputTokens),
        Route(CountInputRequest, count_input_tokens, ResponseInputTokens),
        Route(EmbeddingRequest, embeddings, Embeddings, "embd-", _in_engine),
        Route(ClassifyRequest, classify, Classes, "classify-", _in_engine),
        Route(PoolingRequest, pooling, PooledOutputs, "pool-", _in_engine),
        Route(RerankRequest, rerank, Ranking, "rerank-", _in_engine),
        Route(ScoreRequest, score, Scores, "score-", _in_engine),
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
        session = service.session(request.state.record, body, route.prefix, request.headers.get(HEADER))
        is_background = bool(getattr(body, "background", False))
        has_own_limit = is_background or bool(getattr(body, "stream", False))
        seconds = timeout_s(request.headers, service.config.request_timeout_s, has_own_limit)
        if is_background and kept is not None:
            return await kept.start(session, body, seconds)
        return EngineResponse(
            service,
            session,
            route.num_sequences(body, session.info.decode),
            seconds,
            lambda engine_session: route.answer(body, engine_session, chat),
        )

    return handle
