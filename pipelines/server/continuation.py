"""Runs a generation request in the engine and returns its answer, as one body or as events."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.replicas.engine_process.frames import Submit
from pipelines.server.api.answers import ChoiceText
from pipelines.server.api.generation import Generation
from pipelines.server.api.writers import Writer
from pipelines.server.engine_response import Result, Stream
from pipelines.server.engine_session import EngineSession
from pipelines.server.stream import written


async def _pass() -> None: ...


async def continued(
    session: EngineSession,
    generation: Generation,
    writer: Writer,
    is_stream: bool,
    before_end: Callable[[], Awaitable[None]] = _pass,
) -> Result:
    """Return the response, or its event stream once the engine has accepted the request. Raises ApiError.

    `before_end` is called when the response is complete, before the client gets the body or the last events.
    """
    submits = zip(generation.prompts, generation.settings, strict=True)
    session.submit([Submit(0, *submit, **session.named._asdict(), streams=is_stream) for submit in submits])
    generation.dones = session.dones
    try:
        await session.accepted()
    except EngineRefused as refused:
        raise generation.refused(refused.message) from refused
    if is_stream:
        return Stream(_events(session, generation, writer, before_end), writer.failed)
    choices = [ChoiceText() for _ in generation.choices]
    async for prompt, delta in session.deltas():
        index, received, remaining = generation.take(prompt, delta)
        choices[index].add(received)
        choices[index].add(remaining)
    body = writer.body(choices)
    await before_end()
    return body


async def _events(
    session: EngineSession, generation: Generation, writer: Writer, before_end: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes]:
    if begun := writer.begin():
        yield written(begun)
    async with aclosing(session.deltas()) as deltas:
        async for prompt, delta in deltas:
            if events := writer.read(*generation.take(prompt, delta)):
                yield written(events)
    last = writer.end()
    await before_end()
    yield written(last)
