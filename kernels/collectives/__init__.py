"""What the ranks of one stage exchange within a step, so that all of them have the numbers of one process.

A rank computes some of the outputs of a layer. No numbers are added across ranks: pieces are only put beside each other, so results
have the bits that one process gives.

T rows, p ranks, E channels.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


class RankFailed(Exception):
    """Another rank of the group has failed, so that no result of the step counts."""


class Group(Protocol):
    """A rank's side of the collectives of its stage. Every rank calls the same ones in the same order."""

    rank: int
    size: int

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Return the pieces of all ranks beside each other, in their order: [T, sum(widths)]. x [T, widths[rank]], any dtype."""

    def gather_first(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """Return what `gather` does to rank 0, and None to the others."""

    def owned_rows(self, rows: Tensor, owners: Tensor) -> Tensor:
        """Return [T, E], row t as rank owners[t] has it. rows [T, E] of every rank, owners int64 [T], the same on all ranks."""

    def check(self) -> None:
        """Raise RankFailed where another rank has failed. Called after a step, whose collectives may have returned anything then."""


class Neighbours(NamedTuple):
    """The groups of two that join a rank to one of the stage before, and to one of the stage after. Who receives is rank 0."""

    before: Group | None = None
    after: Group | None = None


NO_NEIGHBOURS = Neighbours()


class Link:
    """One side of the way from a rank to another."""

    def __init__(self, pair: Group, width: int) -> None:
        """`pair`: both ranks, of which rank 0 receives. `width`: E."""
        self.width = width
        self._pair, self._widths = pair, (0, width)

    def send(self, x: Tensor) -> None:
        """Give x [T, E] to the other rank, without waiting until it has it where that is possible."""
        self._pair.gather_first(x, self._widths)

    def receive(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what the other rank sends next, [T, E]. Both know its shape and dtype."""
        x = self._pair.gather_first(torch.empty(num_rows, 0, dtype=dtype, device=device), self._widths)
        assert x is not None
        return x


class Alone:
    """The group of a rank that has no others: it gives back what it gets, without a copy."""

    rank = 0
    size = 1

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        return x

    def gather_first(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        return x

    def owned_rows(self, rows: Tensor, owners: Tensor) -> Tensor:
        return rows

    def check(self) -> None:
        """Do nothing: no other rank can fail."""


class Threads:
    """A rank that is a thread, beside others in the same process. Slow: it is the reference, and what tests compute with."""

    def __init__(self, rank: int, size: int, table: "_Table") -> None:
        self.rank, self.size, self._table = rank, size, table

    @staticmethod
    def of(size: int) -> "list[Threads]":
        """Return the groups of `size` ranks, one for each thread. Collectives raise RankFailed once a rank has failed."""
        table = _Table(size)
        return [Threads(rank, size, table) for rank in range(size)]

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        check_piece(x, widths, self.rank, self.size)
        return self._exchange(x, lambda pieces: torch.cat(pieces, dim=1))

    def gather_first(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        check_piece(x, widths, self.rank, self.size)
        return self._exchange(x, lambda pieces: None if self.rank else torch.cat(pieces, dim=1))

    def owned_rows(self, rows: Tensor, owners: Tensor) -> Tensor:
        check_rows(rows, owners)
        return self._exchange(rows, lambda each: torch.stack(each)[owners, torch.arange(len(rows), device=rows.device)])

    def check(self) -> None:
        if self._table.barrier.broken:
            raise RankFailed

    def fail(self) -> None:
        """Tell the other ranks that this one has failed."""
        self._table.barrier.abort()

    def _exchange(self, x: Tensor, combine: Callable[[list[Tensor]], R]) -> R:
        """Return what `combine` makes of all ranks' tensors, while no rank goes on to change its own."""
        table = self._table
        table.pieces[self.rank] = x
        try:
            table.barrier.wait()
            result = combine([*table.pieces])
            table.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankFailed from error
        return result


class _Table:
    """Holds what all threads of a group see."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.pieces = [torch.empty(0)] * size


def check_piece(x: Tensor, widths: tuple[int, ...], rank: int, size: int) -> None:
    """Raise ValueError where x [T, W] is not the piece of this rank, or there is not a width for each."""
    if len(widths) != size or x.ndim != 2 or x.shape[1] != widths[rank]:
        raise ValueError(f"a piece {list(x.shape)} of rank {rank} of {size}, whose pieces have widths {widths}")


def check_rows(rows: Tensor, owners: Tensor) -> None:
    """Raise ValueError where there is not an owner int64 for each of rows [T, E]."""
    if rows.ndim != 2 or owners.shape != rows.shape[:1] or owners.dtype != torch.int64:
        raise ValueError(f"rows {list(rows.shape)} with owners {list(owners.shape)} of {owners.dtype}")
