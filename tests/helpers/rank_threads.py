"""Ranks as threads of this process, which make no graphs for derivatives."""

from collections.abc import Callable
from typing import TypeVar

import torch

from kernels.collectives import Threads
from pipelines.ranks import threads
from pipelines.ranks.threads import ThreadPlace

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Threads], T]) -> list[T]:
    """What `work` returns to each rank. Raises the error of the rank that failed first."""
    return run_stages(size, 1, lambda place: work(place.group))


def run_stages(tp: int, pp: int, work: Callable[[ThreadPlace], T]) -> list[T]:
    """What `work` returns to each rank of all stages. Raises the error of the rank that failed first."""

    def of(place: ThreadPlace) -> T:
        with torch.inference_mode():
            return work(place)

    return threads.run_ranks(tp, pp, of)
