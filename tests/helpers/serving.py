"""An engine process over a small model, and its complete answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from conf.schema import DeviceConfig, DeviceType, ModelConfig, RunConfig, Task
from conf.serving import ServeConfig
from models.tokenizers import Tokenizer, load_tokenizer
from pipelines.replicas.engine_process.client import EngineClient, RemoteEngine
from pipelines.replicas.engine_process.frames import Beat, Delta, Done, Logprob, Submit, SubmitPooled
from tests.helpers.builders import REPOSITORY
from tests.helpers.waiting import LIMIT_S

T = TypeVar("T")


def tiny_run(**device: Any) -> RunConfig:
    """Return a run of the bundled model on the CPU."""
    model = ModelConfig(path=str(REPOSITORY / "models" / "tiny"))
    return RunConfig(model=model, device=DeviceConfig(DeviceType.cpu, **device))


@dataclass
class Sample:
    """The joined deltas of a sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_deltas: int = 0


@dataclass
class Whole:
    seed: int
    samples: dict[int, Sample]
    done: Done

    @property
    def texts(self) -> list[str]:
        return [sample.text for _, sample in sorted(self.samples.items())]

    @property
    def token_ids(self) -> list[list[int]]:
        return [sample.token_ids for _, sample in sorted(self.samples.items())]


class Asked:
    """A submitted request and its deltas."""

    def __init__(self, client: RemoteEngine, submit: Submit | SubmitPooled) -> None:
        self._news = asyncio.Event()
        self.answer = client.submit(submit, self._news)
        self.accepted, self.cancel = self.answer.accepted, self.answer.cancel

    async def __aiter__(self) -> AsyncIterator[Delta | Done]:
        while not self.answer.is_over:
            await self._news.wait()
            self._news.clear()
            while (item := self.answer.take()) is not None:
                yield item


async def whole(answer: Asked) -> Whole:
    """Return the joined deltas of a request, and check their order."""
    seed, samples, done = await answer.accepted(), dict[int, Sample](), None
    async for item in answer:
        assert done is None
        if isinstance(item, Done):
            done = item
            continue
        sample = samples.setdefault(item.sample, Sample())
        assert sample.finish_reason is None
        sample.text += item.text
        sample.token_ids += item.token_ids
        sample.logprobs += item.logprobs
        sample.finish_reason, sample.stop_reason = item.finish_reason, item.stop_reason
        sample.num_deltas += 1
    assert done is not None
    return Whole(seed, samples, done)


@asynccontextmanager
async def serving(run: RunConfig | None = None, **config: Any) -> AsyncIterator[EngineClient]:
    """Return a client whose engine is loaded. `config`: fields of ServeConfig."""
    client = EngineClient(replace(run or tiny_run(), task=Task.serve, serve=ServeConfig(**config)))
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


async def idle(client: EngineClient) -> Beat:
    """Return the first beat in which nothing runs or waits."""
    deadline = time.monotonic() + LIMIT_S
    while (beat := client.beat) is None or beat.num_running or beat.num_waiting:
        assert time.monotonic() < deadline, "requests still run"
        await asyncio.sleep(0.005)
    return beat


def run_async(test: Coroutine[Any, Any, T]) -> T:
    """Run the test and return its result. Fails if it takes too long."""
    return asyncio.run(asyncio.wait_for(test, LIMIT_S))


@cache
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(REPOSITORY / "models" / "tiny")
    assert tokenizer is not None
    return tokenizer
