"""Ranks that are threads of this process, without autograd."""

from collections.abc import Callable
from typing import TypeVar

import torch

from kernels.collectives import Threads
from pipelines.ranks import threads
from pipelines.ranks.threads import ThreadRankContext

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Threads], T]) -> list[T]:
    """Return the result of `work` of each rank. Raises the error of the rank that failed first."""
    return run_stages(size, 1, lambda context: work(context.group))


def run_stages(tp: int, pp: int, work: Callable[[ThreadRankContext], T]) -> list[T]:
    """Return the result of `work` of each rank of all stages. Raises the error of the rank that failed first."""

    def of(context: ThreadRankContext) -> T:
        with torch.inference_mode():
            return work(context)

    return threads.run_ranks(tp, pp, of)
