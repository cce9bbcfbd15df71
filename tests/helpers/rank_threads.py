"""Ranks as threads of this process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from kernels.collectives import RankFailed, Threads

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Threads], T]) -> list[T]:
    """What `work` returns to each rank. Raises the error of the rank that failed first."""

    def of(group: Threads) -> T:
        try:
            with torch.inference_mode():
                return work(group)
        except BaseException:
            group.fail()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(of, group) for group in Threads.of(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, RankFailed)), errors[0])
    return [future.result() for future in futures]
