"""The choice of an engine for a request, and the combined state of several engines. The engines are fake;
test_workers.py has real ones."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import UserError
from conf.serving import ServeConfig
from pipelines.replicas.cluster import replicas_of
from pipelines.replicas.engine_process.client import EngineClient, EngineGone, EngineRefused
from pipelines.replicas.engine_process.frames import Beat, LoadAdapter, Ready, Submit, SubmitPooled
from pipelines.replicas.replicas import CHUNK_TOKENS, LEAD, Replicas, chunks_of
from pipelines.server.admission import Admission
from pipelines.server.api.errors import ApiError
from tests.helpers.serving import run_async, tiny_run

BATCH_SIZE = 8
ALLOWED = int(LEAD * BATCH_SIZE)  # more requests than the least loaded engine has


class Client:
    """A fake engine. A request ends when the test ends it."""

    def __init__(self, num_cache_tokens: int = 1 << 20, fingerprint: str | None = "fp_1") -> None:
        self.info: Ready | None = Ready(1024, 1024, fingerprint, {}, num_cache_tokens)
        self.beat: Beat | None = None
        self.num_restarts = 0
        self.num_requests = 0
        self.adapters: dict[str, str] = {}
        self.loads: str | Exception = "digest"
        """The digest of each adapter that is loaded, or the error."""

    def submit(self, submit: Submit, news: asyncio.Event) -> "Client":
        self.num_requests += 1
        return self

    async def wait_ready(self) -> Ready | None:
        return self.info

    async def load_adapter(self, adapter: LoadAdapter) -> str:
        if isinstance(self.loads, Exception):
            raise self.loads
        self.expect_adapter(adapter.of(self.loads))
        return self.loads

    def expect_adapter(self, adapter: LoadAdapter) -> None:
        self.adapters[adapter.name] = str(adapter.digest)
        if self.info is not None:
            self.info = self.info.having(dict(self.adapters))

    async def unload_adapter(self, name: str) -> None:
        self.adapters.pop(name, None)
        if self.info is not None:
            self.info = self.info.having(dict(self.adapters))


def together(*clients: Client) -> tuple[Replicas, Callable[..., int]]:
    """Return the clients, and a function that sends a prompt and returns the number of the client that got it."""
    replicas = Replicas(cast(list[EngineClient], clients), BATCH_SIZE)

    def send(tokens: list[int], ends: bool = True, **fields: Any) -> int:
        submit = Submit(0, tokens, fields.pop("decode", {}), **fields)
        chosen = clients.index(cast(Client, replicas.submit(submit, asyncio.Event())))
        clients[chosen].num_requests -= ends
        return chosen

    return replicas, send


def prompt(group: int, num_tokens: int = 4 * CHUNK_TOKENS, last: int = 0) -> list[int]:
    """Return tokens with a prefix of this group only."""
    return [group] + [7] * (num_tokens - 1) + [last]


def test_prompts_with_a_common_prefix_go_to_one_engine() -> None:
    _, send = together(Client(), Client())
    groups = [0, 1, 2, 3, 2, 0, 3, 1, 1, 1]
    chosen = [send(prompt(group, last=i)) for i, group in enumerate(groups)]
    # new prompts go to the engine with the shortest memory
    assert chosen == [{0: 0, 1: 1, 2: 0, 3: 1}[group] for group in groups]


def test_the_longest_beginning_counts() -> None:
    _, send = together(Client(), Client())
    first = send(prompt(1, 2 * CHUNK_TOKENS))
    other = send([1] + [7] * (2 * CHUNK_TOKENS) + [9] * 40, ends=False)
    assert first == other
    busy = [send(prompt(1, 2 * CHUNK_TOKENS, i), ends=False) for i in range(ALLOWED + 1)]
    assert busy[-1] != first  # which has too many
    assert send([1] + [7] * (2 * CHUNK_TOKENS) + [9] * 40 + [5] * 40) == first


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2)), max_size=120), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_no_engine_has_much_more_than_another(events: list[tuple[int, bool, int]], num_clients: int) -> None:
    """Requests of four groups come, and other requests end, in any order."""
    clients = [Client() for _ in range(num_clients)]
    _, send = together(*clients)
    for group, comes, which in events:
        if comes:
            before = [client.num_requests for client in clients]
            chosen = send(prompt(group), ends=False)
            assert before[chosen] <= min(before) + ALLOWED
            assert before[chosen] < BATCH_SIZE or min(before) >= BATCH_SIZE
        else:
            clients[which % num_clients].num_requests = max(0, clients[which % num_clients].num_requests - 1)


def test_no_request_waits_while_another_engine_has_room() -> None:
    clients = [Client(), Client()]
    _, send = together(*clients)
    assert send(prompt(1)) == 0
    loads = {(BATCH_SIZE - 1, BATCH_SIZE - 2): 0, (BATCH_SIZE, BATCH_SIZE - 1): 1, (BATCH_SIZE + 1, BATCH_SIZE): 0}
    for (clients[0].num_requests, clients[1].num_requests), chosen in loads.items():
        assert send(prompt(1, 2 * CHUNK_TOKENS)) == chosen
        clients[1].num_restarts += 1  # so that it knows nothing of it


def test_requests_that_may_not_share_blocks_have_different_chunks() -> None:
    tokens = prompt(1)
    cases = [
        Submit(0, tokens, {}),
        Submit(0, tokens, {}, adapter="fr"),
        Submit(0, tokens, {}, prefix="fr"),
        Submit(0, tokens, {"cache_salt": "a"}),
        Submit(0, tokens, {"cache_salt": "b"}),
        SubmitPooled(0, tokens, adapter="de"),
        SubmitPooled(0, tokens, cache_salt="c"),
    ]
    assert len({tuple(chunks_of(case)) for case in cases}) == len(cases)
    assert chunks_of(cases[0]) == chunks_of(Submit(5, tokens, {"temperature": 0.5, "n": 2}, streams=True))
    assert [len(chunks_of(Submit(0, [1] * n, {}))) for n in (0, CHUNK_TOKENS - 1, CHUNK_TOKENS, 40)] == [0, 0, 1, 2]
    long = chunks_of(Submit(0, tokens[:33] + [8] * 31, {}))
    assert [a == b for a, b in zip(chunks_of(cases[0]), long, strict=True)] == [True, True, False, False]


def test_no_more_is_remembered_than_a_cache_holds() -> None:
    clients = [Client(6 * CHUNK_TOKENS), Client(6 * CHUNK_TOKENS)]
    replicas, send = together(*clients)
    first = send(prompt(1, 4 * CHUNK_TOKENS))
    assert [replica.num_chunks for replica in replicas._replicas] == [4, 0]
    clients[1 - first].num_requests = ALLOWED + 1  # so that all requests go to the first
    send(prompt(2, 4 * CHUNK_TOKENS))
    assert [replica.num_chunks for replica in replicas._replicas] == [6, 0]
    known = [replicas._replicas[0].num_known(chunks_of(Submit(0, prompt(i), {}))) for i in (1, 2)]
    assert known == [2, 4]  # the older one's end was forgotten


def test_the_least_recently_used_entry_is_dropped_first() -> None:
    replicas, send = together(Client(6 * CHUNK_TOKENS))
    for group in (1, 2, 3, 1, 4):
        send(prompt(group, 2 * CHUNK_TOKENS))
    known = [
        replicas._replicas[0].num_known(chunks_of(Submit(0, prompt(i, 2 * CHUNK_TOKENS), {}))) for i in range(1, 5)
    ]
    assert known == [2, 0, 2, 2]


def test_an_engine_that_began_again_knows_nothing() -> None:
    clients = [Client(), Client()]
    _, send = together(*clients)
    assert [send(prompt(1)), send(prompt(1, last=1))] == [0, 0]
    clients[0].num_restarts = 1
    clients[0].num_requests = 1
    assert send(prompt(1)) == 1


def test_only_engines_that_are_ready_and_answer_alike_are_used() -> None:
    clients = [Client(200), Client(100), Client(50, fingerprint="fp_2")]
    replicas, send = together(*clients)
    assert replicas.info == clients[1].info  # a prompt that fits there fits everywhere
    assert {send(prompt(i), ends=False) for i in range(9)} == {0, 1}
    with pytest.raises(UserError, match=r"would answer differently \(fp_1, fp_2\): give them equal machines"):
        run_async(replicas.wait_ready())
    clients[0].info = None
    assert send(prompt(0)) == 1
    clients[1].info = None
    assert (send(prompt(0)), replicas.info) == (2, clients[2].info)
    clients[2].info = None
    assert replicas.info is None
    with pytest.raises(EngineGone, match="the engines are loading their model"):
        send(prompt(0))


def test_beats_are_added() -> None:
    clients = [Client(), Client(), Client()]
    replicas, _ = together(*clients)
    assert replicas.beat is None
    clients[0].beat = Beat(3, 1, 0.5, 100, 40, 2, 0.03)
    assert replicas.beat == clients[0].beat
    clients[2].beat, clients[2].num_restarts = Beat(1, 0, 0.1, 10, 4, 1, 0.05), 2
    beat = replicas.beat
    assert beat == Beat(4, 1, 0.3, 110, 44, 3, 0.05)
    assert replicas.beat is beat  # admission checks whether there is a new one
    clients[2].beat = Beat(1, 0, 0.1, 10, 4, 1, 0.05)
    assert replicas.beat is not beat
    assert replicas.num_restarts == 2
    clients[0].beat = Beat(3, 1, 0.5, 100, 40, 2, 0.03, [1, 0, 2], 17)
    clients[2].beat = Beat(1, 0, 0.1, 10, 4, 1, 0.05, [0, 5, 1], 30)
    beat = replicas.beat
    assert beat is not None
    assert (beat.num_steps, beat.num_step_tokens) == ([1, 5, 3], 47)


def test_ray_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")  # so that no environment variable is set
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "pipelines.replicas.workers", raising=False)
    run = tiny_run()
    run.serve.replicas = 2
    with pytest.raises(UserError, match=r"serve.replicas=2 needs the package ray: pip install 'quintet\[ray\]'"):
        replicas_of(run)


def test_as_many_are_admitted_as_the_engines_run() -> None:
    reasons: list[str] = []
    admission = Admission(Client(), ServeConfig(batch_size=2, replicas=3, max_waiting=1), reasons.append)
    with (
        admission.place(7, 60.0),
        pytest.raises(ApiError, match="7 sequences run or wait") as refused,
        admission.place(1, 60.0),
    ):
        pass
    assert (refused.value.status, reasons) == (429, ["sequences"])


@pytest.mark.long
def test_all_engines_have_an_adapter_or_none_has_it() -> None:
    adapter = LoadAdapter(0, "fr", "/adapters/fr")

    async def test() -> None:
        clients = [Client(), Client(), Client()]
        replicas, send = together(*clients)
        refusal = EngineRefused("damaged")
        for loads, expected in (
            (["digest", refusal, "digest"], "damaged"),
            (["digest", "another", "digest"], "the replicas have different files in /adapters/fr"),
            ([EngineGone("the engine ended")] * 3, "the engine ended"),
            ([EngineGone("the engine ended"), refusal, "digest"], "damaged"),
        ):
            for client, load in zip(clients, loads, strict=True):
                client.loads = load  # type: ignore[assignment]
            with pytest.raises((EngineRefused, EngineGone), match=expected):
                await replicas.load_adapter(adapter)
            assert [client.adapters for client in clients] == [{}, {}, {}]
        clients[0].loads, clients[1].loads, clients[2].loads = "digest", EngineGone("the engine ended"), "digest"
        clients[2].info, ready = None, clients[2].info  # it restarts
        assert await replicas.load_adapter(adapter) == "digest"
        assert [client.adapters for client in clients] == [{"fr": "digest"}] * 3
        clients[2].info = ready  # without the adapter, which it could not load again
        assert {send(prompt(i), ends=False, adapter="fr") for i in range(9)} == {0, 1}
        assert replicas.info is not None
        assert replicas.info.adapters == {"fr": "digest"}
        await replicas.unload_adapter("fr")
        assert [client.adapters for client in clients] == [{}, {}, {}]
        with pytest.raises(EngineGone):
            send(prompt(1), adapter="fr")
        clients[0].info = ready and ready.having({"fr": "one"})
        clients[1].info = ready and ready.having({"fr": "two"})
        with pytest.raises(
            UserError, match="the replicas have different adapters fr: give all machines the same files"
        ):
            await replicas.wait_ready()

    run_async(test())
