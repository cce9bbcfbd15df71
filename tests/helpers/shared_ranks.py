"""A process that is a rank of shared memory: `python -m tests.helpers.shared_ranks FD RANK SIZE JOB`, started by
test_shared_memory.py."""

import random
import sys
import time

import torch
from torch import Tensor

from kernels import build
from kernels.capture import capture
from kernels.collectives import Group, RankFailed
from kernels.collectives.shared_memory import SharedMemory

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64)


def pieces_of(draw: random.Random, size: int, num_rows: int, widths: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Return the pieces of all ranks, equal in every process."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return [torch.randint(-99, 99, (num_rows, width), generator=generator).to(dtype) for width in widths[:size]]


def exchange(group: Group) -> None:
    """Compare collectives of random sizes with torch's results over all pieces."""
    draw = random.Random(group.size)
    sizes = [(draw.randrange(40), draw.randrange(1, 300)) for _ in range(60)] + [(2500, 1400), (3, 400_000)]
    for num_rows, most in sizes:
        widths = [draw.randrange(0, most + 1) for _ in range(group.size)]
        dtype = draw.choice(DTYPES)
        pieces = pieces_of(draw, group.size, num_rows, widths, dtype)
        piece, expected = pieces[group.rank], torch.cat(pieces, dim=1)
        assert torch.equal(group.gather(piece, tuple(widths)), expected)
        first = group.gather_first(piece, tuple(widths))
        assert (first is None) if group.rank else (first is not None and torch.equal(first, expected))
        rows = pieces_of(draw, group.size, num_rows, [most] * group.size, dtype)
        owners = torch.tensor([draw.randrange(group.size) for _ in range(num_rows)], dtype=torch.int64)
        wanted = torch.stack([rows[int(owner)][t] for t, owner in enumerate(owners)]) if num_rows else rows[0]
        assert torch.equal(group.owned_rows(rows[group.rank], owners), wanted)
        group.check()


def replay(group: Group) -> None:
    """Record a step of two collectives, and replay it with other inputs."""
    widths = tuple(range(3, 3 + group.size))
    x, owners = torch.zeros(5, widths[group.rank]), torch.zeros(5, dtype=torch.int64)

    def step() -> tuple[Tensor, Tensor]:
        gathered = group.gather(x, widths)
        return gathered, group.owned_rows(gathered + group.rank, owners)

    graph, (gathered, owned) = capture(step)
    assert graph is not None
    for time_ in range(1, 30):
        pieces = [torch.full((5, width), float(time_ + rank)) for rank, width in enumerate(widths)]
        x.copy_(pieces[group.rank])
        owners.fill_(time_ % group.size)
        graph.replay()
        assert torch.equal(gathered, torch.cat(pieces, dim=1))
        assert torch.equal(owned, gathered + time_ % group.size)


def wait_for_ever(group: SharedMemory) -> None:
    """Wait for a rank that does not come, until another process aborts."""
    print("waiting", flush=True)
    group.gather(torch.zeros(1, 1), (1,) * group.size)
    try:
        group.check()
    except RankFailed:
        group.gather(torch.zeros(1, 1), (1,) * group.size)  # returns at once from here on
        print("failed", flush=True)


def abort(group: SharedMemory) -> None:
    group.abort()


JOBS = {"exchange": exchange, "replay": replay, "wait_for_ever": wait_for_ever, "abort": abort}


def main() -> None:
    fd, rank, size = map(int, sys.argv[1:4])
    library = build.library()
    assert library is not None
    group = SharedMemory(library, fd, rank, size, spins=False)
    start = time.process_time()
    JOBS[sys.argv[4]](group)
    print(f"done {time.process_time() - start:.2f}")


if __name__ == "__main__":
    main()
