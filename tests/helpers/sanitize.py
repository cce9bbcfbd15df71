"""A pytest plugin for `make sanitize`: it compiles the C++ kernels with AddressSanitizer and
UndefinedBehaviorSanitizer.

The process must have been started with their library (LD_PRELOAD). The first finding ends it, with a report of the line
on the terminal.
"""

import pytest

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
OPTIMISATION = "-O1"  # compiles four times as fast, and reports the lines of the source


def pytest_sessionstart() -> None:
    """Compile before any test. Without kernels the tests would be skipped, and nothing would be checked."""
    from kernels import build  # not at the top: conftest.py sets torch's environment before torch is imported
    from tests.helpers import ways

    ways.WITHOUT_KERNELS.clear()  # torch's operators are not checked
    build.FLAGS = (*build.FLAGS, OPTIMISATION, *SANITIZERS, "-D_GLIBCXX_ASSERTIONS")
    try:
        build.load(build.instruction_set())
    except build.NotBuilt as error:
        pytest.exit(f"nothing is sanitized: {error}", returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests that fork: a child waits forever for the sanitizer's allocator if another thread holds its lock.
    (gcc 12)"""
    items[:] = [item for item in items if item.get_closest_marker("forks") is None]
