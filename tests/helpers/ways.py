"""The implementations of an operator on this CPU: the C++ kernels of each supported instruction set, and torch's
operators.

A test tries all of them as one case; an error names the implementation. test_build.py reports the instruction sets that
are left out.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kernels import build

Test = Callable[..., None]
WITHOUT_KERNELS = ["torch"]  # tests/helpers/sanitize.py empties it


@functools.cache
def why_not(name: str) -> str | None:
    """Return why the kernels of an instruction set cannot be tested: no compiler, or another CPU. None if they can."""
    names = list(build.INSTRUCTION_SETS)
    try:
        if names.index(name) < names.index(build.instruction_set()):
            return f"this CPU has no {name}"
        build.load(name)
    except build.NotBuilt as error:
        return str(error)
    return None


def need(name: str) -> None:
    """Skip the test if the kernels of an instruction set cannot be tested."""
    if reason := why_not(name):
        pytest.skip(reason)


def every_way() -> list[str]:
    return [*(name for name in build.INSTRUCTION_SETS if why_not(name) is None), *WITHOUT_KERNELS]


def instruction_sets(begin: str = "") -> list[str]:
    """Return the instruction sets with this beginning that can be tested, the best first. Skips the test if there are
    none."""
    names = [name for name in every_way() if name in build.INSTRUCTION_SETS and name.startswith(begin)]
    if not names:
        pytest.skip("there are no such kernels here: test_build.py says why")
    return names


@contextmanager
def computing(way: str) -> Iterator[None]:
    """Compute with the kernels of an instruction set, or with torch's operators. The number of threads is restored at
    the end."""
    library = None if way == "torch" else build.load(way)
    before = library.get_threads() if library else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "library", lambda: library)
        try:
            yield
        except BaseException as error:
            error.add_note(f"computed by {way}")
            raise
        finally:
            if library:
                library.set_threads(before)


def by_ways(ways: Callable[[], list[str]]) -> Callable[[Test], Test]:
    """Run a test with each implementation, with the same random numbers."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for way in ways():
                torch.manual_seed(0)
                with computing(way):
                    test(**fixtures)

        return run

    return decorate


any_way = by_ways(every_way)
compiled = by_ways(instruction_sets)
