"""Collectives of the ranks of one pipeline stage within a step. All ranks get the numbers that a single process
computes.

Each rank computes a part of the outputs of a layer. The collectives only concatenate the shards and add no numbers
across ranks, so results are bit-identical to the results of a single process.

T rows, p ranks, E channels.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


class RankFailed(Exception):
    """Another rank of the group has failed. The results of the step are invalid."""


class Group(Protocol):
    """A rank's side of the collectives of its pipeline stage. Every rank calls the same collectives in the same order."""

    rank: int
    size: int

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Return the pieces of all ranks concatenated in the order of ranks: [T, sum(widths)]. x [T, widths[rank]], any
        dtype."""

    def gather_first(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """Return the result of `gather` on rank 0 and None on other ranks."""

    def owned_rows(self, rows: Tensor, owners: Tensor) -> Tensor:
        """Return [T, E]: row t is row t of rank owners[t]. rows [T, E] of every rank; owners int64 [T], equal on all
        ranks."""

    def check(self) -> None:
        """Raise RankFailed if another rank has failed. Called after a step; the results of its collectives are
        undefined then."""


class Neighbours(NamedTuple):
    """Groups of two ranks that connect a rank to the previous and to the next pipeline stage. The receiver is rank 0."""

    before: Group | None = None
    after: Group | None = None


NO_NEIGHBOURS = Neighbours()


class Link:
    """One side of the connection from one rank to another."""

    def __init__(self, pair: Group, width: int) -> None:
        """`pair`: the group of both ranks; rank 0 receives. `width`: E."""
        self.width = width
        self._pair, self._widths = pair, (0, width)

    def send(self, x: Tensor) -> None:
        """Send x [T, E] to the other rank. Does not wait for the receiver if the group supports that."""
        self._pair.gather_first(x, self._widths)

    def receive(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the next tensor [T, E] from the other rank. Sender and receiver agree on its shape and dtype."""
        x = self._pair.gather_first(torch.empty(num_rows, 0, dtype=dtype, device=device), self._widths)
        assert x is not None
        return x


class Alone:
    """The group of a single rank. It returns its inputs without a copy."""

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
    """A rank that is a thread of this process. Slow: for tests and as a reference."""

    def __init__(self, rank: int, size: int, table: "_Table") -> None:
        self.rank, self.size, self._table = rank, size, table

    @staticmethod
    def of(size: int) -> "list[Threads]":
        """Return the groups of `size` ranks, one per thread. Collectives raise RankFailed after a rank has failed."""
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
        return self._exchange(
            rows, lambda all_rows: torch.stack(all_rows)[owners, torch.arange(len(rows), device=rows.device)]
        )

    def check(self) -> None:
        if self._table.barrier.broken:
            raise RankFailed

    def fail(self) -> None:
        """Report the failure of this rank to the other ranks."""
        self._table.barrier.abort()

    def _exchange(self, x: Tensor, combine: Callable[[list[Tensor]], R]) -> R:
        """Return `combine` of the tensors of all ranks. No rank continues, and changes its tensor, before all have
        finished."""
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
    """State shared by all threads of a group."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.pieces = [torch.empty(0)] * size


def check_piece(x: Tensor, widths: tuple[int, ...], rank: int, size: int) -> None:
    """Raise ValueError unless x [T, W] has the width of this rank's piece and `widths` has one entry per rank."""
    if len(widths) != size or x.ndim != 2 or x.shape[1] != widths[rank]:
        raise ValueError(f"a piece {list(x.shape)} of rank {rank} of {size}, whose pieces have widths {widths}")


def check_rows(rows: Tensor, owners: Tensor) -> None:
    """Raise ValueError unless there is one int64 owner per row of rows [T, E]."""
    if rows.ndim != 2 or owners.shape != rows.shape[:1] or owners.dtype != torch.int64:
        raise ValueError(f"rows {list(rows.shape)} with owners {list(owners.shape)} of {owners.dtype}")
