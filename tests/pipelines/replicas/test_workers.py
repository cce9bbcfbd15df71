"""Engines in Ray workers: two of them answer as one does, and one may end."""

import asyncio
import os
import random
import select
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.schema import RunConfig, Task
from conf.serving import ServeConfig
from pipelines.ranks.launch import joined
from pipelines.replicas.cluster import replicas_of
from pipelines.replicas.engine_process.client import EngineClient, EngineGone, EngineRefused
from pipelines.replicas.engine_process.frames import Delta, Submit
from pipelines.replicas.replicas import Replicas
from tests.helpers.command import run
from tests.helpers.launchers import SRUN, TORCHRUN
from tests.helpers.processes import engines
from tests.helpers.serving import Asked, Whole, run_async, serving, tiny_run, whole
from tests.helpers.waiting import LIMIT_S

pytestmark = [pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray"), pytest.mark.long]

GREEDY = {"temperature": 0.0, "max_new_tokens": 8}
ENDLESS = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}


def run_of(number: int = 2, **config: Any) -> RunConfig:
    return replace(tiny_run(), task=Task.serve, serve=ServeConfig(replicas=number, **config))


@pytest.fixture(autouse=True, scope="module")
def one_ray() -> Iterator[None]:
    """All tests share a Ray, which a process starts once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
        import ray

        ray.shutdown()


@asynccontextmanager
async def replicated(**config: Any) -> AsyncIterator[Replicas]:
    replicas = replicas_of(run_of(**config))
    await replicas.start()
    try:
        await replicas.wait_ready()
        yield replicas
    finally:
        await replicas.close()


async def end_of(answer: Asked) -> str:
    """Return how the rest of an answer ends."""
    reasons = []
    try:
        async for item in answer:
            reasons += [item.finish_reason] if isinstance(item, Delta) and item.finish_reason else []
    except EngineGone as gone:
        return str(gone)
    return reasons[-1]


async def first_token(answer: Asked) -> None:
    async for item in answer:
        if isinstance(item, Delta):
            return


def prompts_of(num_groups: int, num_prompts: int) -> list[list[int]]:
    """Return prompts of 112 tokens; each group shares 96. One prompt of each group comes, in any order, and then the
    next ones."""
    draw = random.Random(3)
    beginnings = [[draw.randrange(300, 900) for _ in range(96)] for _ in range(num_groups)]
    return [
        beginning + [draw.randrange(300, 900) for _ in range(16)]
        for _ in range(num_prompts)
        for beginning in draw.sample(beginnings, num_groups)
    ]


async def answers_of(engine: EngineClient | Replicas, submits: list[Submit], num_at_once: int) -> list[Whole]:
    """Return the answers to requests, with this number in flight."""
    places = asyncio.Semaphore(num_at_once)

    async def answered(submit: Submit) -> Whole:
        async with places:
            return await whole(Asked(engine, submit))

    return await asyncio.gather(*map(answered, submits))


@pytest.mark.long
def test_two_answer_as_one_and_compute_hardly_more() -> None:
    submits = [
        Submit(0, prompt, GREEDY | ({"temperature": 0.8, "seed": i} if i % 3 else {}), streams=i % 2 > 0)
        for i, prompt in enumerate(prompts_of(num_groups=6, num_prompts=40))
    ]

    async def test() -> None:
        async with serving(batch_size=8) as one:
            alone = await answers_of(one, submits, 8)
            fingerprint = one.info and one.info.fingerprint
        async with replicated(batch_size=8) as two:
            assert two.info is not None
            assert two.info.fingerprint == fingerprint
            shared = await answers_of(two, submits, 8)
            used = [len(replica._chunks) > 0 for replica in two._replicas]
            cores = [os.sched_getaffinity(pid) for pid in engines()]
        assert used == [True, True]
        # Separate processors, if two are free of replicas of other tests.
        assert not cores[0] & cores[1] or os.sched_getaffinity(0) in cores
        assert [(answer.token_ids, answer.texts) for answer in shared] == [
            (answer.token_ids, answer.texts) for answer in alone
        ]
        cached = [sum(answer.done.num_cached_tokens for answer in answers) for answers in (shared, alone)]
        assert cached[1] > 0.7 * 96 * len(submits)
        # Of 240 at least all but 12, if each replica has each prefix, or all but 24 if two prompts with a prefix come
        # to each at once.
        assert cached[0] >= 0.9 * cached[1]

    run_async(test())


@pytest.mark.long
def test_where_one_is_killed_the_other_continues_and_what_crashed_two_is_refused_by_both() -> None:
    submits = [Submit(0, [300 + i] * 20, ENDLESS | {"seed": i}, streams=True) for i in range(4)]

    async def test() -> None:
        async with replicated() as replicas:
            clients, before = replicas._clients, engines()
            answers = [Asked(replicas, submit) for submit in submits]
            await asyncio.gather(*map(first_token, answers))
            assert [client.num_requests for client in clients] == [2, 2]
            os.kill(next(iter(before.values())), signal.SIGKILL)
            ends = await asyncio.gather(*map(end_of, answers))
            assert sorted(ends) == ["length"] * 2 + ["the engine lost its worker of Ray: send the request again"] * 2
            again = [await whole(Asked(replicas, submits[i])) for i in range(2)]  # by the other one
            assert sorted(client.num_restarts for client in clients) == [0, 1]
            await replicas.wait_ready()
            assert len(engines().keys() - before.keys()) == 1
            for client in clients:
                assert (await whole(Asked(client, submits[0]))).token_ids == again[0].token_ids
            await crash_twice(replicas, Submit(0, [400] * 20, ENDLESS, streams=True))

    run_async(test())


async def crash_twice(replicas: Replicas, poison: Submit) -> None:
    for client in replicas._clients:
        answer = Asked(client, poison)
        await first_token(answer)
        for pid in engines():
            os.kill(pid, signal.SIGKILL)
        assert "was ended by SIGKILL: send the request again" in await end_of(answer)
        while replicas.info is not None:  # the other replica's loss has not been noticed yet
            await asyncio.sleep(0.01)
        await replicas.wait_ready()
    for client in replicas._clients:
        with pytest.raises(EngineRefused, match="crashed, 2 times"):
            await Asked(client, poison).accepted()


@pytest.mark.long
def test_a_hung_engine_and_a_hung_worker_of_ray_are_started_again_and_leave_nothing() -> None:
    async def test() -> None:
        async with replicated(number=1, stall_s=2.0) as replicas:
            for hangs in ("engine", "worker"):
                ((engine, worker),) = engines().items()
                ended = [os.pidfd_open(pid) for pid in ((engine,) if hangs == "engine" else (engine, worker))]
                os.kill(engine if hangs == "engine" else worker, signal.SIGSTOP)
                with pytest.raises(EngineGone, match=r"sent nothing for serve.stall_s=2.0 seconds: send"):
                    await whole(Asked(replicas, Submit(0, [300] * 20, GREEDY)))
                await replicas.wait_ready()
                assert (await whole(Asked(replicas, Submit(0, [300] * 20, GREEDY)))).done.error is None
                for process in ended:
                    assert select.select([process], [], [], LIMIT_S)[0]
                    os.close(process)

    run_async(test())


@pytest.mark.long
def test_a_place_that_another_job_has_is_waited_for_aloud(caplog: pytest.LogCaptureFixture) -> None:
    """The other job releases its resources after the message."""
    from ray.util.placement_group import placement_group, remove_placement_group

    from pipelines.replicas.connection import connect

    cpus, _ = connect()
    other = placement_group([{"CPU": sum(cpus)}])
    assert other.wait(LIMIT_S)

    async def test() -> None:
        replicas = replicas_of(replace(run_of(1), device=replace(tiny_run().device, threads=1)))
        await replicas.start()
        while not caplog.messages:
            await asyncio.sleep(0.05)
        remove_placement_group(other)
        await replicas.wait_ready()
        await replicas.close()

    run_async(test())
    free = f"and 0 of {sum(cpus)} CPU are free: end other jobs, or give fewer replicas"
    wanted = f"a replica has not started yet: waiting until Ray has 1 CPU free on one machine for each, {free}"
    assert caplog.messages == [wanted]


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_is_an_error_of_one_line() -> None:
    async def failure() -> str:
        with pytest.raises(UserError) as raised:
            async with replicated(batch_size=4096):
                pass
        return str(raised.value)

    assert "batch_size=4096 is more than device.max_batched_tokens=2048" in run_async(failure())


@pytest.mark.long
def test_a_cluster_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.replicas.connection import _connect

    remedy = "give HOST:PORT of a cluster's head, or leave it out"
    for address in ("auto", "ray://127.0.0.1:10001"):
        with pytest.raises(UserError, match=rf"^RAY_ADDRESS={address} cannot be reached \(.*\): {remedy}$"):
            _connect(address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    done = run("task=serve", "serve.port=0", "serve.replicas=2", f"hydra.run.dir={tmp_path}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert "error: RAY_ADDRESS=127.0.0.1:1 cannot be reached (" in done.stderr
    assert remedy in done.stderr


@pytest.mark.parametrize("started", [SRUN, TORCHRUN], ids=["srun", "torchrun"])
def test_an_engine_starts_its_ranks_where_a_launcher_has_started_ray(
    started: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example with `srun ray start` on two machines, whose variables Ray's workers and their processes inherit."""
    from pipelines.replicas import workers

    results: list[object] = []

    async def start() -> None:
        results.append(joined(os.environ))

    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(workers.LocalChild, "start", start)
    assert joined(os.environ) is not None
    asyncio.run(workers.EngineWorker().start(0))
    assert results == [None]
