"""Collectives of processes over TCP, compared with torch's results over all pieces; NCCL's code path, through gloo."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from itertools import product
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from kernels.collectives import torch_group
from kernels.collectives.gloo import Gloo
from kernels.collectives.torch_group import serve_addresses
from tests.helpers.cases import each
from tests.helpers.tiers import tiers

HOST = "127.0.0.1"
DEADLINE_S = 60.0  # time limit for work of a second or two


def start(stack: ExitStack, port: int, rank: int, size: int, job: str, kind: str = "gloo") -> "subprocess.Popen[str]":
    """Start a rank. The stack ends it."""
    command = [sys.executable, "-m", "tests.helpers.tcp_ranks", *map(str, (port, rank, size)), job, kind]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # a stopped process in the tests' group may cause SIGHUP for all of them: tests/helpers/rank_runs.py
    process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def ended(process: "subprocess.Popen[str]", told: str) -> list[str]:
    """Return the output of a rank that is told to end. The rank has to end by itself."""
    assert process.stdin is not None
    process.stdin.write(told)
    process.stdin.flush()
    assert process.wait(DEADLINE_S) == 0
    assert process.stdout is not None
    return process.stdout.read().splitlines()


EVERY = [*product(("gloo", "nccl"), ("exchange", "replay"), (2, 3))]
QUICK = [("gloo", "exchange", 2), ("gloo", "replay", 3), ("nccl", "replay", 2)]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "job", "size"), tiers(EVERY, QUICK, EVERY))
def test_ranks_have_what_torch_makes_of_all_pieces(kind: str, job: str, size: int) -> None:
    server = serve_addresses(HOST)
    with ExitStack() as stack:
        ranks = [start(stack, server.port, rank, size, job, kind) for rank in range(size)]
        assert [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks] == ["done\n"] * size


@each("number", [signal.SIGKILL, signal.SIGSTOP])
@each("job", ["gather_for_ever", "receive_for_ever"])
def test_a_rank_continues_and_ends_where_another_is_lost(job: str, number: signal.Signals) -> None:
    """A killed rank closes its sockets. If a rank is stopped, `abort` tells the waiting rank."""
    server = serve_addresses(HOST)
    with ExitStack() as stack:
        rank, lost = (start(stack, server.port, place, 2, job) for place in range(2))
        assert [process.stdout and process.stdout.readline() for process in (rank, lost)] == ["waiting\n"] * 2
        lost.send_signal(number)
        told = "" if number == signal.SIGKILL else "abort\n"
        assert ended(rank, told) == ["aborted" if told else "lost", "done"]


def test_a_rank_ends_if_no_rank_receives_its_numbers() -> None:
    server = serve_addresses(HOST)
    with ExitStack() as stack:
        lost, rank = (start(stack, server.port, place, 2, "send_for_ever") for place in range(2))
        assert lost.stdout is not None
        assert lost.stdout.readline() == "waiting\n"
        lost.send_signal(signal.SIGSTOP)
        assert ended(rank, "send\n") == ["done"]


def test_a_rank_without_peers_ends_when_it_is_told() -> None:
    server = serve_addresses(HOST)
    with ExitStack() as stack:
        assert ended(start(stack, server.port, 0, 2, "meet_for_ever"), "abort\n") == ["waiting", "aborted", "done"]


def test_a_rank_that_connected_to_no_rank_ends_normally() -> None:
    server = serve_addresses(HOST)
    with ExitStack() as stack:
        assert ended(start(stack, server.port, 0, 2, "leave"), "") == ["done"]


def test_wrong_pieces_are_refused() -> None:
    server = serve_addresses(HOST)
    group = Gloo((HOST, server.port), "alone", 0, 1, HOST, server)
    x = torch.randn(3, 5)
    assert torch.equal(group.gather(x, (5,)), x)
    with pytest.raises(ValueError, match=r"a piece \[3, 5\] of rank 0"):
        group.gather(x, (4,))
    with pytest.raises(ValueError, match=r"rows \[3, 5\] with owners \[2\]"):
        group.owned_rows(x, torch.zeros(2, dtype=torch.int64))


def test_ranks_that_do_not_meet_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group, "RENDEZVOUS_S", 1.0)
    server = serve_addresses(HOST)
    group = Gloo((HOST, server.port), "half", 0, 2, HOST, server)
    with pytest.raises(UserError) as raised:
        group.gather(torch.zeros(1, 1), (1, 1))
    first, last = (
        "rank 0 of 2 has not met the other ranks of its group: ",
        ": let machines reach each other at all ports",
    )
    assert str(raised.value).startswith(first)
    assert str(raised.value).endswith(last)
    assert "\n" not in str(raised.value)


class LateWork:
    """Replaces torch's work. Its first wait times out just before the numbers arrive."""

    num_waits = 0

    def wait(self, timeout: timedelta) -> None:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.num_waits > 0


class LateGroup:
    """Replaces torch's group. Its work is late."""

    def __init__(self) -> None:
        self.works: list[LateWork] = []
        self.sent: list[ReferenceType[Tensor]] = []

    def _allgather_base(self, pieces: Tensor, piece: Tensor) -> LateWork:
        pieces.copy_(piece)
        return self._begun()

    def gather(self, pieces: list[Tensor], piece: list[Tensor], options: object) -> LateWork:
        self.sent.append(ref(piece[0]))
        return self._begun()

    def _begun(self) -> LateWork:
        self.works.append(LateWork())
        return self.works[-1]


class LateGloo(Gloo):
    def _connect(self, ranks: object, address: str) -> LateGroup:
        self.late = LateGroup()
        return self.late


def test_work_that_ends_between_two_looks_is_not_a_failure() -> None:
    server = serve_addresses(HOST)
    group, x = LateGloo((HOST, server.port), "alone", 0, 1, HOST, server), torch.randn(3, 5)
    assert torch.equal(group.gather(x, (5,)), x)
    group.check()
    assert [work.num_waits for work in group.late.works] == [2]


def test_sent_tensors_are_kept_until_the_transfer_ends() -> None:
    server = serve_addresses(HOST)
    _, group = (LateGloo((HOST, server.port), "two", rank, 2, HOST, server) for rank in range(2))
    for waits, kept in (([0], [True]), ([2, 0], [False, True])):
        assert group.gather_first(torch.zeros(3, 1), (5, 1)) is None
        assert [work.num_waits for work in group.late.works] == waits
        assert [numbers() is not None for numbers in group.late.sent] == kept
