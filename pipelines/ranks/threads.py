"""Ranks as threads of this process, to verify a sharded model before it is exported. Slow, as are their groups."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from kernels.collectives import Neighbours, RankFailed, Threads
from models.sharding import ParallelLayout

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadRankContext:
    """The place of a rank that is a thread, and its groups."""

    parallel_layout: ParallelLayout
    group: Threads
    neighbours: Neighbours


def run_ranks(tp: int, pp: int, work: Callable[[ThreadRankContext], T]) -> list[T]:
    """Run `work` once for each rank of all stages and return the results.

    Raises the error of the rank that failed first.
    """
    stages = [Threads.of(tp) for _ in range(pp)]
    borders = [[Threads.of(2) for _ in range(tp)] for _ in range(pp - 1)]
    everyone = [group for stage in stages for group in stage]
    everyone += [group for border in borders for pair in border for group in pair]

    def resources_of(stage: int, rank: int) -> ThreadRankContext:
        before = borders[stage - 1][rank][0] if stage else None
        after = borders[stage][rank][1] if stage < pp - 1 else None
        return ThreadRankContext(ParallelLayout(tp, pp, rank, stage), stages[stage][rank], Neighbours(before, after))

    def of(context: ThreadRankContext) -> T:
        try:
            return work(context)
        except BaseException:
            for group in everyone:
                group.fail()
            raise

    with ThreadPoolExecutor(tp * pp) as threads:
        futures = [threads.submit(of, resources_of(stage, rank)) for stage in range(pp) for rank in range(tp)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, RankFailed)), errors[0])
    return [future.result() for future in futures]
