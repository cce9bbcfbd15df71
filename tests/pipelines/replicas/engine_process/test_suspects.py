"""Requests that are not run again: those that were in two crashes, until enough time has passed."""

import asyncio
from collections.abc import Callable

import pytest

from conf.schema import RunConfig
from pipelines.replicas.engine_process.client import Answer, EngineClient, EngineRefused
from pipelines.replicas.engine_process.frames import (
    Accepted,
    Began,
    Done,
    FrameReader,
    FromEngine,
    Refused,
    Submit,
    SubmitPooled,
    ToEngine,
    encode,
)
from pipelines.replicas.engine_process.suspects import FORGOTTEN_S, MAX_SUSPECTS, Suspects
from tests.helpers.cases import each
from tests.helpers.fake_engine import READY
from tests.helpers.serving import run_async

POISON, OTHER = Submit(0, [5, 6], {"max_new_tokens": 3}), Submit(0, [7], {})


def test_a_suspect_is_forgotten_after_an_hour() -> None:
    now_s = 0.0
    suspects = Suspects(lambda: now_s)
    suspects.crashed([POISON, POISON, OTHER])  # twice in one crash
    assert not suspects.has(POISON)
    now_s = 10.0
    suspects.crashed([POISON])
    assert suspects.has(POISON)
    assert not suspects.has(OTHER)
    now_s = FORGOTTEN_S + 5  # the other request's crash is forgotten
    suspects.crashed([OTHER])
    assert suspects.has(POISON)
    assert not suspects.has(OTHER)
    now_s = FORGOTTEN_S + 11
    assert not suspects.has(POISON)
    suspects.crashed([POISON])
    assert not suspects.has(POISON)


def test_who_ended_well_is_not_a_suspect_and_there_are_not_too_many() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.crashed([POISON])
    suspects.cleared(Submit(9, [5, 6], {"max_new_tokens": 3, "seed": 4}))
    assert not suspects.has(POISON)
    for _ in range(2):
        suspects.crashed([POISON])
    suspects.crashed(Submit(0, [i], {}) for i in range(MAX_SUSPECTS))
    assert not suspects.has(POISON)


def test_vectors_of_different_adapters_are_different_requests() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.crashed([SubmitPooled(1, [5], "fr")])
    assert suspects.has(SubmitPooled(2, [5], "fr"))
    assert not suspects.has(SubmitPooled(2, [5], "de"))
    assert not suspects.has(SubmitPooled(2, [5], prefix="fr"))
    assert not suspects.has(SubmitPooled(2, [5]))


class ScriptedChild:
    """A child whose frames for each request are given by `says`. It ends with the last request that it receives."""

    def __init__(self, says: Callable[[int], list[FromEngine]], num_requests: int) -> None:
        self._says, self._num_requests = says, num_requests
        self._frames = FrameReader(ToEngine)
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self._said.put_nowait(encode(READY))

    def write(self, content: bytes) -> None:
        for frame in self._frames.read(content):
            if isinstance(frame, Submit):
                self._num_requests -= 1
                self._said.put_nowait(b"".join(map(encode, self._says(frame.id))))
                if self._num_requests == 0:
                    self._said.put_nowait(b"")

    def write_eof(self) -> None:
        self._said.put_nowait(b"")

    def kill(self) -> None:
        self._said.put_nowait(b"")

    async def read(self) -> bytes:
        return await self._said.get()

    async def ended(self) -> str:
        return "was ended by SIGKILL"

    async def close(self) -> None:
        pass


DONE = {"num_prompt_tokens": 1, "num_cached_tokens": 0, "num_generated_tokens": 1, "queue_s": 0.0, "first_token_s": 0.0}


@pytest.mark.long
@each(
    ("is_suspect", "says"),
    [
        (False, lambda id: []),  # it was never checked
        (True, lambda id: [Began([id])]),  # its check may have ended the process
        (False, lambda id: [Began([id]), Accepted(id, 3)]),  # it waited
        (True, lambda id: [Began([id]), Accepted(id, 3), Began([id])]),
        (False, lambda id: [Began([id]), Refused(id, "no")]),
        (False, lambda id: [Began([id]), Accepted(id, 3), Began([id]), Done(id, **DONE, total_s=0.1)]),
    ],
)
def test_a_request_that_only_waited_is_not_a_suspect(is_suspect: bool, says: Callable[[int], list[FromEngine]]) -> None:
    async def ask(client: EngineClient) -> Answer:
        await client.wait_ready()
        return client.submit(POISON, asyncio.Event())

    async def test() -> None:
        async def start() -> ScriptedChild:
            return ScriptedChild(says, 1)

        client = EngineClient(RunConfig(), start)
        await client.start()
        for _ in range(2):
            answer = await ask(client)
            while client.info is not None:
                await asyncio.sleep(0)
            assert answer.submit.prompt_token_ids == POISON.prompt_token_ids
            client._backoff_s = 0.0
        third = await ask(client)
        is_refused = third._error is not None
        assert is_refused == is_suspect
        if is_refused:
            with pytest.raises(EngineRefused, match="when the engine crashed, 2 times: it is not run again"):
                await third.accepted()
        await client.close()

    run_async(test())
