"""Limits of `make test`, and the count of its processes. tests/test_budgets.py and tests/conftest.py enforce them."""

import sys
from typing import Any

from kernels.build import FLAGS

QUICK = "not long and not matrix"  # the -m option of `make test`
CASES = 2590  # cases that pytest collects; a loop inside a test (tests/helpers/cases.py) counts as one
PROCESSES = 290  # processes that its workers start or fork
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")  # audit events


class ProcessCount:
    """Counts the processes that this process starts from now on.

    Compilers of the kernels do not count: their number depends on the cache folder, which is empty on a new machine.
    """

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        self.count += event in STARTS and not (event == "subprocess.Popen" and _compiles_kernels(arguments[1]))


def _compiles_kernels(command: Any) -> bool:
    return isinstance(command, list) and tuple(command[1 : len(FLAGS) + 1]) == FLAGS
