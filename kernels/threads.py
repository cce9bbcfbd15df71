"""The number of threads of the C++ kernels. Results do not depend on it."""

import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from kernels import build

Item = TypeVar("Item")
Result = TypeVar("Result")


def set_threads(num_threads: int | None) -> None:
    """Set the number of threads, including the calling one. None is the initial value: one per physical core that the
    process may use.

    Without the C++ kernels this does nothing, because torch has its own threads. Raises ValueError if it is less than
    1.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"{num_threads} threads: give at least 1")
    library = build.library()
    if library is not None:
        at_first = _at_first(library)
        library.set_threads(num_threads or at_first)


def use_cores(cpus: Collection[int]) -> None:
    """Pin the calling thread and its worker threads to these hardware threads, with one thread per physical core."""
    os.sched_setaffinity(0, cpus)
    library = build.library()
    if library is not None:
        library.read_cores()
        _at_first.cache_clear()


@functools.cache
def _at_first(library: build.Library) -> int:
    """Return the number of threads before the first change."""
    return int(library.get_threads())


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """Set the number of threads of the C++ kernels during a step; None keeps it. torch's own operators use one thread
    meanwhile.

    Further torch threads would spin for milliseconds after each operator on the cores where the C++ kernels run. The
    change costs a microsecond: no thread ends, and unused threads sleep. Without the C++ kernels this does nothing.
    """
    library = build.library()
    if library is None:
        yield
        return
    before, before_of_torch = library.get_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    if num_threads is not None:
        set_threads(num_threads)
    try:
        yield
    finally:
        set_threads(before)
        torch.set_num_threads(before_of_torch)


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return function(item) for each item, computed by as many Python threads as the C++ kernels have.

    torch's operators use one thread in each, so their bits do not depend on the number of threads. The function computes
    no gradients.
    """
    library = build.library()
    num_threads = torch.get_num_threads() if library is None else library.get_threads()
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(torch.no_grad()(function), items))
    finally:
        torch.set_num_threads(before)  # MKL has one number for the whole process
