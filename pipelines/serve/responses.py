"""The route /v1/responses: a chat whose chunks are written as events of a response."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import Response

from pipelines.api.errors import ApiError, bad_request
from pipelines.api.requests import parse_request
from pipelines.api.responses import ResponseRequest, ResponseWriter, renamed
from pipelines.serve.chat import Chat
from pipelines.serve.completions import ChatAnswer
from pipelines.serve.endpoints import call_of, written
from pipelines.serve.exchange import Exchange
from pipelines.serve.generation import Event
from pipelines.serve.openapi import takes
from pipelines.serve.resumption import HEADER
from pipelines.serve.service import Result, Service


def add_responses(app: FastAPI, service: Service, chat: Chat) -> None:
    """Add the route."""

    @app.post("/v1/responses", **takes(ResponseRequest))
    async def responses(request: Request) -> Response:
        """Continue a conversation that is sent as a whole, in items."""
        body = parse_request(ResponseRequest, await request.body())
        if request.headers.get(HEADER) is not None:
            raise bad_request(f"streams of responses have no ids to go on from: leave {HEADER} out", HEADER)
        chat_body = body.chat()

        async def work(exchange: Exchange) -> Result:
            try:
                prompt = await chat.encode(chat_body)
                call = call_of(request, exchange, chat, "resp")
                answer = ChatAnswer(call, chat_body, prompt.token_ids, prompt.reader, prompt.settings)
                await answer.accepted()
            except ApiError as error:
                raise renamed(error) from error
            events = _events(answer, ResponseWriter(body, exchange.record.id))
            if body.stream:
                return written(events, ends=False)
            last = [each.data async for each in events][-1]
            return dict(last["response"])

        return await service.respond(request, body.model, 1, bool(body.stream), work)


async def _events(answer: ChatAnswer, writer: ResponseWriter) -> AsyncGenerator[Event]:
    """Yield the events that a chat's chunks make."""
    async with aclosing(answer.events()) as chunks:
        async for chunk in chunks:
            for each in writer.read(chunk.data):
                yield Event(each, name=each["type"])
    for each in writer.end():
        yield Event(each, name=each["type"])
