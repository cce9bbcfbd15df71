"""Runs a generation request in the engine and returns its answer, as one body or as events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.replicas.engine_process.frames import Submit
from pipelines.server.api.answers import ChoiceText
from pipelines.server.api.generation import Generation
from pipelines.server.api.writers import Writer
from pipelines.server.engine_session import EngineSession
from pipelines.server.service import Result, Stream
from pipelines.server.stream import written


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
