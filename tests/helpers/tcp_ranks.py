"""A process that is a rank over TCP: `python -m tests.helpers.tcp_ranks PORT RANK SIZE JOB KIND`, started by
test_gloo.py."""

import signal
import sys
import threading
from collections.abc import Callable

import torch

from kernels.collectives import RankFailed
from kernels.collectives.gloo import Gloo
from kernels.collectives.nccl import Nccl
from kernels.collectives.torch_group import TorchGroup
from tests.helpers.shared_ranks import exchange, replay

HOST = "127.0.0.1"


class NcclByGloo(Nccl):
    """The interface of NCCL's groups over a gloo group, which every torch has."""

    _connect = Gloo._connect  # type: ignore[assignment]


KINDS: dict[str, type[TorchGroup]] = {"gloo": Gloo, "nccl": NcclByGloo}


def gather_for_ever(group: TorchGroup) -> None:
    """Rank 0 waits for a rank that is lost after a first exchange."""
    _wait_for_ever(group, lambda: group.gather(torch.zeros(1, 1), (1,) * group.size))


def receive_for_ever(group: TorchGroup) -> None:
    """Rank 0 waits for the rank of the previous stage, which is lost after a first exchange."""
    _wait_for_ever(group, lambda: group.gather_first(torch.zeros(1, group.rank), (0, 1)))


def send_for_ever(group: TorchGroup) -> None:
    """Rank 1 sends to rank 0, which is lost after a first exchange and receives nothing; then rank 1 is told of the
    loss."""
    group.gather_first(torch.zeros(1, group.rank), (0, 1))
    if group.rank == 0:
        print("waiting", flush=True)
        signal.pause()
    sys.stdin.readline()
    group.gather_first(torch.zeros(1, 1), (0, 1))
    group.abort()


def meet_for_ever(group: TorchGroup) -> None:
    """Rank 0 waits for a rank that never comes."""
    _fail(group, lambda: group.gather(torch.zeros(1, 1), (1,) * group.size))


def leave(group: TorchGroup) -> None:
    """Rank 0 ends before another rank has come."""


def _wait_for_ever(group: TorchGroup, exchange: Callable[[], object]) -> None:
    exchange()
    if group.rank:
        print("waiting", flush=True)
        signal.pause()
    _fail(group, exchange)


def _fail(group: TorchGroup, exchange: Callable[[], object]) -> None:
    """Print whether a line of standard input ended the exchange."""
    told = threading.Event()

    def abort_when_told() -> None:
        if sys.stdin.readline():
            told.set()
            group.abort()

    threading.Thread(target=abort_when_told, daemon=True).start()
    print("waiting", flush=True)
    try:
        exchange()
    except RankFailed:
        print("aborted" if told.is_set() else "lost", flush=True)


JOBS = {
    "exchange": exchange,
    "replay": replay,
    "gather_for_ever": gather_for_ever,
    "receive_for_ever": receive_for_ever,
    "send_for_ever": send_for_ever,
    "meet_for_ever": meet_for_ever,
    "leave": leave,
}


def main() -> None:
    (port, rank, size), job, kind = map(int, sys.argv[1:4]), *sys.argv[4:]
    JOBS[job](KINDS[kind]((HOST, port), "ranks", rank, size, HOST))
    print("done")


if __name__ == "__main__":
    main()
