"""Ranks that are threads of this process: what proves a divided model before it is written. Slow, like the groups that join them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from kernels.collectives import Neighbours, RankFailed, Threads
from models.cuts import Division

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadPlace:
    """A rank in one of several stages."""

    division: Division
    group: Threads
    neighbours: Neighbours


def run_ranks(tp: int, pp: int, work: Callable[[ThreadPlace], T]) -> list[T]:
    """Return what `work` returns to each rank of all stages. Raises the error of the rank that failed first."""
    stages = [Threads.of(tp) for _ in range(pp)]
    borders = [[Threads.of(2) for _ in range(tp)] for _ in range(pp - 1)]
    everyone = [group for stage in stages for group in stage]
    everyone += [group for border in borders for pair in border for group in pair]

    def place_of(stage: int, rank: int) -> ThreadPlace:
        before = borders[stage - 1][rank][0] if stage else None
        after = borders[stage][rank][1] if stage < pp - 1 else None
        return ThreadPlace(Division(tp, pp, rank, stage), stages[stage][rank], Neighbours(before, after))

    def of(place: ThreadPlace) -> T:
        try:
            return work(place)
        except BaseException:
            for group in everyone:
                group.fail()
            raise

    with ThreadPoolExecutor(tp * pp) as threads:
        futures = [threads.submit(of, place_of(stage, rank)) for stage in range(pp) for rank in range(tp)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, RankFailed)), errors[0])
    return [future.result() for future in futures]
