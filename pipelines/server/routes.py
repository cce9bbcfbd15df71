"""The table of the routes that read a body, and their registration."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import Response

from pipelines.server.api.answer_shapes import (
    AnswerShape,
    ChatAnswer,
    CompletionAnswer,
    Embeddings,
    InputTokens,
    MessageAnswer,
    Ranking,
    ResponseAnswer,
    ResponseInputTokens,
    Scores,
    Text,
    Tokens,
)
from pipelines.server.api.conversation import Chat
from pipelines.server.api.embeddings import IN_ENGINE, EmbeddingRequest
from pipelines.server.api.message_requests import CountTokensRequest, MessagesRequest
from pipelines.server.api.parsing import parse_request
from pipelines.server.api.ranking import RerankRequest, ScoreRequest
from pipelines.server.api.requests import Body, ChatRequest, CompletionRequest
from pipelines.server.api.response_requests import CountInputRequest, ResponseRequest
from pipelines.server.api.resumption import HEADER
from pipelines.server.engine_session import EngineSession
from pipelines.server.generation_routes import chat_completions, completions, message, respond
from pipelines.server.openapi import takes
from pipelines.server.service import EngineResponse, Result, Service, timeout_s
from pipelines.server.token_routes import (
    DetokenizeRequest,
    TokenizeRequest,
    count_input_tokens,
    count_tokens,
    detokenize,
    embeddings,
    rerank,
    score,
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


def _num_texts(body: RerankRequest | ScoreRequest) -> int:
    return min(len(body.scored_texts()[0]), IN_ENGINE)


ROUTES = {
    path: route
    for route in (
        Route(ChatRequest, chat_completions, ChatAnswer, "chatcmpl-", has_samples=True, statuses=(412,)),
        Route(CompletionRequest, completions, CompletionAnswer, "cmpl-", lambda body: len(body.prompts), True, (412,)),
        Route(ResponseRequest, respond, ResponseAnswer, "resp_"),
        Route(MessagesRequest, message, MessageAnswer, "msg_"),
        Route(CountTokensRequest, count_tokens, InputTokens),
        Route(CountInputRequest, count_input_tokens, ResponseInputTokens),
        Route(EmbeddingRequest, embeddings, Embeddings, "embd-", lambda body: min(len(body.inputs), IN_ENGINE)),
        Route(RerankRequest, rerank, Ranking, "rerank-", _num_texts),
        Route(ScoreRequest, score, Scores, "score-", _num_texts),
        Route(TokenizeRequest, tokenize, Tokens),
        Route(DetokenizeRequest, detokenize, Text),
    )
    for path in (route.kind.path, *route.kind.aliases)
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
        seconds = timeout_s(request.headers, service.config.request_timeout_s, bool(getattr(body, "stream", False)))
        session = service.session(request.state.record, body, route.prefix, request.headers.get(HEADER))
        return EngineResponse(
            service,
            session,
            route.num_sequences(body, session.info.decode),
            seconds,
            lambda engine_session: route.answer(body, engine_session, chat),
        )

    return handle
