"""Collectives of processes with shared memory, compared with torch's results over all pieces."""

import os
import subprocess
import sys
from contextlib import ExitStack
from itertools import product

import pytest
import torch

from kernels import build
from kernels.collectives import RankFailed
from kernels.collectives.shared_memory import SharedMemory, create_shared_memory
from tests.helpers.cases import each
from tests.helpers.tiers import tiers

LIBRARY = build.library()
EVERY = [*product(("replay", "exchange"), (2, 3))]
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="shared memory needs the C++ kernels")


def start(stack: ExitStack, fd: int, rank: int, size: int, job: str) -> "subprocess.Popen[str]":
    """Start a rank. The stack ends it."""
    command = [sys.executable, "-m", "tests.helpers.shared_ranks", *map(str, (fd, rank, size)), job]
    process = subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE, text=True)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


@pytest.mark.parametrize(("job", "size"), tiers(EVERY, [("replay", 2)], EVERY))
def test_ranks_have_what_torch_makes_of_all_pieces(job: str, size: int) -> None:
    assert LIBRARY is not None
    fd = create_shared_memory(LIBRARY, size)
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        ranks = [start(stack, fd, rank, size, job) for rank in range(size)]
        assert [rank.communicate()[0][:4] for rank in ranks] == ["done"] * size


@pytest.mark.long
@each("size", [2, 3])
def test_exchanges_are_counted_beyond_the_largest_number(size: int) -> None:
    assert LIBRARY is not None
    fd = create_shared_memory(LIBRARY, size)
    for rank in range(size):
        # its count, in the cache line after the abort word
        os.pwrite(fd, (2**32 - 3).to_bytes(4, "little"), 64 * (1 + rank))
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        ranks = [start(stack, fd, rank, size, "exchange") for rank in range(size)]
        assert [rank.communicate()[0][:4] for rank in ranks] == ["done"] * size


@pytest.mark.long
def test_abort_wakes_all_ranks_and_they_need_no_processor_while_they_wait() -> None:
    assert LIBRARY is not None
    fd = create_shared_memory(LIBRARY, 3)
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        ranks = [start(stack, fd, rank, 3, "wait_for_ever") for rank in (0, 1)]
        assert [rank.stdout and rank.stdout.readline() for rank in ranks] == ["waiting\n"] * 2
        assert start(stack, fd, 2, 3, "abort").wait() == 0
        for rank in ranks:
            said = rank.communicate()[0].split()
            assert said[:2] == ["failed", "done"]
            assert float(said[2]) < 1.0


@pytest.mark.long
def test_sleeping_ranks_see_the_abort_word() -> None:
    """For example if the aborting rank is killed before it wakes the other ranks."""
    assert LIBRARY is not None
    fd = create_shared_memory(LIBRARY, 2)
    with ExitStack() as stack:
        rank = start(stack, fd, 0, 2, "wait_for_ever")
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waiting\n"
        os.pwrite(fd, b"\1", 0)  # the abort word comes first
        os.close(fd)
        assert rank.communicate()[0].split()[:1] == ["failed"]


def test_a_region_of_one_rank_gives_back_its_own() -> None:
    assert LIBRARY is not None
    group = SharedMemory(LIBRARY, create_shared_memory(LIBRARY, 1), 0, 1, spins=True)
    x = torch.randn(3, 5)
    assert torch.equal(group.gather(x, (5,)), x)
    group.check()
    group.abort()
    with pytest.raises(RankFailed):
        group.check()


def test_wrong_pieces_are_refused() -> None:
    assert LIBRARY is not None
    group = SharedMemory(LIBRARY, create_shared_memory(LIBRARY, 1), 0, 1, spins=False)
    with pytest.raises(ValueError, match=r"a piece \[3, 5\] of rank 0"):
        group.gather(torch.randn(3, 5), (4,))
    with pytest.raises(ValueError, match="a row of 8000000 bytes is more than the 4194304"):
        group.gather(torch.randn(1, 2_000_000), (2_000_000,))
    with pytest.raises(ValueError, match="513 ranks are more than"):
        create_shared_memory(LIBRARY, 513)
