"""A rank's place in the parallel layout, and the groups for its collectives."""

import os
from contextlib import suppress
from dataclasses import dataclass

from conf.schema import Backend, ExpertPlacement, ParallelConfig, Sum
from kernels import build
from kernels.collectives import Alone, Neighbours
from kernels.collectives.gloo import Gloo
from kernels.collectives.nccl import Nccl
from kernels.collectives.shared_memory import SharedMemory, create_shared_memory
from kernels.collectives.torch_group import TorchGroup, serve_addresses
from models.sharding import ParallelLayout
from pipelines.ranks.launch import Rank
from pipelines.ranks.messages import Channel, Gone, Header
from pipelines.ranks.rendezvous import addresses

GROUPS: dict[Backend, type[TorchGroup]] = {Backend.gloo: Gloo, Backend.nccl: Nccl}


def layout_of(rank: int, tp: int, pp: int, parallel: ParallelConfig) -> ParallelLayout:
    """Return the parallel layout of a rank. The tensor parallel ranks of one stage are consecutive."""
    adds, whole_experts = parallel.sum is Sum.reduce, parallel.experts is ExpertPlacement.whole
    return ParallelLayout(tp, pp, rank % tp, rank // tp, adds, whole_experts)


@dataclass(frozen=True)
class RankContext:
    """A rank's place in the parallel layout, and its process groups."""

    parallel_layout: ParallelLayout
    group: SharedMemory | TorchGroup | Alone
    """The tensor parallel group of its stage."""
    neighbours: Neighbours
    num_sharing: int
    """Number of ranks that share this rank's memory: of its machine, or of its GPU."""
    aborted: tuple[SharedMemory | TorchGroup, ...]
    """Groups that a failure of this rank aborts."""

    @property
    def size(self) -> int:
        return self.parallel_layout.tp * self.parallel_layout.pp

    def check(self) -> None:
        """Raise RankFailed if another rank has failed."""
        for group in (self.group, *self.neighbours):
            if group is not None:
                group.check()

    def abort(self) -> None:
        """Release every rank that waits, now and later, with invalid results; their `check` raises."""
        for group in self.aborted:
            group.abort()


def create_memory(library: build.Library, tp: int, pp: int) -> int:
    """Return the file descriptor of shared memory for all groups of a run: one per stage, and one per pair of ranks in
    neighbouring stages.

    Raises ValueError for more ranks than a group supports.
    """
    return create_shared_memory(library, max(tp, 2), pp + (pp - 1) * tp)


def shared_memory_context(library: build.Library, fd: int, parallel_layout: ParallelLayout, spins: bool) -> RankContext:
    """Return the context of a rank that maps the memory of `create_memory`. `spins`: as for SharedMemory."""
    tp, pp, rank, stage = parallel_layout.tp, parallel_layout.pp, parallel_layout.tp_rank, parallel_layout.stage
    stride = library.shared_bytes(max(tp, 2))

    def pair(border: int, pair_rank: int) -> SharedMemory:
        return SharedMemory(library, fd, pair_rank, 2, spins, (pp + border * tp + rank) * stride)

    group = SharedMemory(library, fd, rank, tp, spins, stage * stride)
    neighbours = Neighbours(pair(stage - 1, 0) if stage else None, pair(stage, 1) if stage < pp - 1 else None)
    num_groups = pp + (pp - 1) * tp
    everyone = tuple(SharedMemory(library, fd, 0, 1, spins, number * stride) for number in range(num_groups))
    return RankContext(parallel_layout, group, neighbours, tp * pp, everyone)


def torch_context(
    backend: Backend,
    store: tuple[str, int],
    address: str,
    parallel_layout: ParallelLayout,
    num_local: int,
    num_gpus: int,
    server: object = None,
) -> RankContext:
    """Return the context of a rank that other ranks reach at `address`. `store` and `server`: as for TorchGroup.

    `num_local`: ranks on this machine. `num_gpus`: GPUs of this machine; 0: ranks compute on CPUs.
    """
    tp, pp, rank, stage = parallel_layout.tp, parallel_layout.pp, parallel_layout.tp_rank, parallel_layout.stage
    kind = GROUPS[backend]

    def pair(border: int, pair_rank: int) -> TorchGroup:
        return kind(store, f"border {border} rank {rank}", pair_rank, 2, address, server)

    group = kind(store, f"stage {stage}", rank, tp, address, server) if tp > 1 else Alone()
    neighbours = Neighbours(pair(stage - 1, 0) if stage else None, pair(stage, 1) if stage < pp - 1 else None)
    torch_groups = tuple(link for link in (group, *neighbours) if isinstance(link, TorchGroup))
    return RankContext(parallel_layout, group, neighbours, -(-num_local // max(num_gpus, 1)), torch_groups)


def driver_context(
    ranks: list[Rank], starts: list[Header], parallel: ParallelConfig, library: build.Library | None, spins: bool
) -> RankContext:
    """Send each worker its first message, with the address of the groups, and return rank 0's context.

    `starts`: the messages, in the order of `ranks`. `spins`: as for SharedMemory.
    """
    if Backend[starts[0]["backend"]] is not Backend.shared_memory:
        return _begin_in_groups(ranks, starts, parallel)
    assert library is not None
    return _begin_in_memory(ranks, starts, parallel, library, spins)


def _begin_in_memory(
    ranks: list[Rank], starts: list[Header], parallel: ParallelConfig, library: build.Library, spins: bool
) -> RankContext:
    tp, pp = starts[0]["tp"], starts[0]["pp"]
    fd = create_memory(library, tp, pp)
    try:
        for rank, start in zip(ranks, starts, strict=True):
            with suppress(Gone):  # the watcher thread reports the reason
                rank.channel.send(start | {"spins": spins})
                rank.channel.send_file(fd)
        return shared_memory_context(library, fd, layout_of(0, tp, pp, parallel), spins)
    finally:
        os.close(fd)


def _begin_in_groups(ranks: list[Rank], starts: list[Header], parallel: ParallelConfig) -> RankContext:
    driver_address, *worker_addresses = addresses(ranks)
    server = serve_addresses(driver_address)
    for rank, start, address in zip(ranks, starts, worker_addresses, strict=True):
        with suppress(Gone):  # the watcher thread reports the reason
            rank.channel.send(start | {"store": [driver_address, server.port], "address": address})
    start = starts[0]
    parallel_layout = layout_of(0, start["tp"], start["pp"], parallel)
    backend, num_local, num_gpus = Backend[start["backend"]], start["num_local"], start["num_gpus"]
    return torch_context(
        backend, (driver_address, server.port), driver_address, parallel_layout, num_local, num_gpus, server
    )


def worker_context(
    start: Header, parallel: ParallelConfig, channel: Channel, library: build.Library | None
) -> RankContext:
    """Return the context of a worker. `start`: the message that `driver_context` sent to it.

    With shared memory, receives the file descriptor from `channel`.
    """
    parallel_layout = layout_of(start["rank"], start["tp"], start["pp"], parallel)
    if "store" in start:
        host, port = start["store"]
        backend, num_local, num_gpus = Backend[start["backend"]], start["num_local"], start["num_gpus"]
        return torch_context(backend, (host, port), start["address"], parallel_layout, num_local, num_gpus)
    assert library is not None
    return shared_memory_context(library, channel.receive_file(), parallel_layout, start["spins"])
