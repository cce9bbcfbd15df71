"""The prompts of one request in the engine, each a request of its own there."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from models.tokenizers.base import Tokenizer
from pipelines.api.errors import SERVER_ERROR, ApiError
from pipelines.serve.frames import Delta, Done, Ready, Submit, SubmitPooled


class Answer(Protocol):
    """A `client.Answer` that raises ApiError where the engine ends."""

    async def accepted(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[Delta | Done]: ...
    def cancel(self) -> None: ...


class Engine(Protocol):
    """The engine as a request uses it. Raises ApiError where there is none."""

    @property
    def info(self) -> Ready: ...
    def submit(self, submit: Submit | SubmitPooled) -> Answer: ...


@dataclass(frozen=True)
class Call:
    """Facts about a request besides its body."""

    engine: Engine
    tokenizer: Tokenizer | None
    id: str
    """Of the answer."""
    model: str
    """Name by which answers call the model."""
    adapter: str | None = None
    key: str | None = None
    """Name of the client's key. Beginnings of prompts are shared by requests of the same key alone."""
    last_event_id: str | None = None
    """The header's value: events have ids then; empty: from the beginning."""


class Submitted:
    """Prompts on their way through the engine."""

    def __init__(self, engine: Engine, submits: Iterable[Submit | SubmitPooled]) -> None:
        """Raises ApiError where there is no engine; then none of them runs."""
        self.dones: dict[int, Done] = {}
        """By prompt: what the engine counted, or the vector."""
        self._answers: list[Answer] = []
        try:
            for submit in submits:
                self._answers.append(engine.submit(submit))
        except BaseException:
            self.cancel()
            raise

    async def accepted(self) -> None:
        """Wait until the engine has taken all prompts. Raises EngineRefused for one that it refuses."""
        for answer in self._answers:
            await answer.accepted()

    def cancel(self) -> None:
        """Leave the prompts. Does nothing behind their end."""
        for answer in self._answers:
            answer.cancel()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield what comes, with the number of the prompt. Raises ApiError where the engine fails."""
        try:
            async for prompt, item in self._items():
                if isinstance(item, Delta):
                    yield prompt, item
                    continue
                self.dones[prompt] = item
                if item.error is not None:
                    raise ApiError(500, item.error, SERVER_ERROR)
        finally:
            self.cancel()

    async def _items(self) -> AsyncIterator[tuple[int, Delta | Done]]:
        """Yield what comes of any prompt. No more is read than is taken, so that deltas go on merging for slow readers."""
        if len(self._answers) == 1:
            async for item in self._answers[0]:
                yield 0, item
            return
        queue: asyncio.Queue[tuple[int, Delta | Done | Exception]] = asyncio.Queue(1)

        async def forward(prompt: int, answer: Answer) -> None:
            try:
                async for item in answer:
                    await queue.put((prompt, item))
            except Exception as error:
                await queue.put((prompt, error))

        tasks = [asyncio.create_task(forward(*item)) for item in enumerate(self._answers)]
        try:
            while len(self.dones) < len(tasks):
                prompt, news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                yield prompt, news
        finally:
            for task in tasks:
                task.cancel()
