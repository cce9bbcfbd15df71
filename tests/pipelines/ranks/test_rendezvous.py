"""The rendezvous of launched ranks with rank 0, and rejected connections."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from conf.errors import UserError
from pipelines.ranks import rendezvous
from pipelines.ranks.launch import Joined, Rank
from pipelines.ranks.messages import LENGTHS, MAX_PAYLOAD_BYTES, Channel, Gone
from pipelines.ranks.rendezvous import RENDEZVOUS_S, _connect, addresses, await_ranks, join, listen


def test_addresses_are_those_by_which_ranks_have_come() -> None:
    class Reached(Channel):
        def __init__(self, own_end: str, other_end: str) -> None:
            self._ends = own_end, other_end

        def addresses(self) -> tuple[str, str]:
            return self._ends

    def addresses_of(host: str | None, *ends: tuple[str, str]) -> list[str]:
        return addresses([Rank(number, 1, Reached(*pair), host=host) for number, pair in enumerate(ends, 1)])

    local, near, far = ("127.0.0.1", "127.0.0.1"), ("127.0.1.1", "127.0.0.1"), ("10.0.0.1", "10.0.0.2")
    assert addresses_of(None, ("", "")) == ["127.0.0.1"] * 2
    assert addresses_of("a", local, local) == ["127.0.0.1"] * 3
    assert addresses_of("a", near, far) == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]


def places(size: int) -> list[Joined]:
    """Return contexts of ranks that meet at a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    return [Joined("torchrun", rank, size, "job", 0, 1, address) for rank in range(size)]


def test_strangers_at_the_port_are_not_ranks() -> None:
    first, second = places(2)
    with ThreadPoolExecutor() as threads:
        connections = threads.submit(await_ranks, first)
        for hello in (
            {"rank": 1, "job": "other", "pid": 1},
            {"rank": 0, "job": "job", "pid": 1},
            {"rank": "1", "job": "job"},
            {"rank": 1, "job": "job", "pid": 1, "cpus": [[]]},
        ):
            Channel(_connect_until_open(second)).send(hello)
        for content in (b"GET / HTTP/1.1\r\n\r\n", LENGTHS.pack(2, MAX_PAYLOAD_BYTES) + b"{}"):
            _connect_until_open(second).sendall(content)
        channel = join(second)
        (rank,) = connections.result()
    assert rank.name == f"rank 1 (process {os.getpid()} on {socket.gethostname()})"
    assert rank.cpus == os.sched_getaffinity(0)
    rank.channel.send({"op": "end"})
    assert channel.receive() == ({"op": "end"}, b"")


def _connect_until_open(place: Joined) -> socket.socket:
    """Connect as `join` does, which waits until rank 0 listens."""
    end = time.monotonic() + RENDEZVOUS_S
    while True:
        try:
            return _connect(place)
        except OSError:
            assert time.monotonic() < end


def test_a_second_process_of_a_rank_is_sent_away() -> None:
    first, second, third = places(3)
    with ThreadPoolExecutor() as threads:
        connections = threads.submit(await_ranks, first)
        channel, again = join(second), join(second)
        with pytest.raises(Gone):
            again.receive()
        join(third)
        ranks = connections.result()
    assert [rank.rank for rank in ranks] == [1, 2]
    ranks[0].channel.send({"op": "end"})
    assert channel.receive() == ({"op": "end"}, b"")


@pytest.mark.parametrize("near", [False, True])
def test_ranks_that_do_not_come_are_one_line(monkeypatch: pytest.MonkeyPatch, near: bool) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", 0.0)
    first, second, _ = places(3)
    where = " at 127.0.0.1:{}".format(*second.address[1:]) if second.address else ""
    if near:
        first, second, where = replace(first, address=None), replace(second, address=None), ""
    remedy = "start all of them together, where they reach each other"
    with pytest.raises(UserError, match=rf"^ranks \[1, 2\] of torchrun have not come within 0 s: {remedy}$"):
        await_ranks(first)
    with pytest.raises(UserError, match=rf"^rank 1 has not met rank 0{where} within 0 s: .*refused: {remedy}$"):
        join(second)


@pytest.mark.parametrize(
    ("launcher", "remedy"), [("torchrun", "give another --master-port"), ("srun", "start srun again, for another port")]
)
def test_a_port_that_is_taken_is_one_line(launcher: str, remedy: str) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^port {port}, where ranks meet rank 0, .* in use .*: {remedy}$"):
            await_ranks(Joined(launcher, 0, 2, "job", 0, 1, ("127.0.0.1", port)))


def test_a_rank_may_come_long_before_rank_0_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 listens, and then calibrates. The other rank's connection waits meanwhile."""
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", 0.0)
    first, second = places(2)
    listen(first)
    channel = join(second)
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", RENDEZVOUS_S)
    (rank,) = await_ranks(first)
    rank.channel.send({"op": "end"})
    assert channel.receive() == ({"op": "end"}, b"")


def test_a_second_model_of_a_process_is_one_line() -> None:
    """For example of a sweep: the ranks have ended with the first model."""
    first, second = places(2)
    with ThreadPoolExecutor() as threads:
        connections = threads.submit(await_ranks, first)
        join(second)
        connections.result()
    wanted = "the ranks that torchrun started have ended with the first model of this process: run each job of a sweep by itself"
    with pytest.raises(UserError, match=f"^{wanted}, or without torchrun$"):
        await_ranks(first)
