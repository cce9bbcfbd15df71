"""Settings of the whole suite. It counts the processes that a run starts, and limits them."""

import gc
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

with suppress(ModuleNotFoundError):  # an image with a GPU may lack it
    from hypothesis import settings

    # Hypothesis draws the same examples in every run; a failure is printed and fails again. A busy machine fails
    # nothing.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")

# Before torch is imported: models of this size do not need a second thread, and on a busy machine the first would wait
# for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.helpers import fork_server  # noqa: E402
from tests.helpers.budget import PROCESSES, QUICK, ProcessCount  # noqa: E402
from tests.helpers.matrix_record import write_record  # noqa: E402

STARTED, BEGAN = pytest.StashKey[ProcessCount](), pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix-record", type=Path, help="write date, revision and result of this run to a file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED], config.stash[BEGAN] = ProcessCount(), time.monotonic()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        fork_server.install()
        config.pluginmanager.import_plugin("tests.helpers.fixtures")
        gc.disable()  # importing the test modules creates a million objects, and none of them is garbage


def pytest_collection_finish() -> None:
    """Freeze the garbage collector's objects, so that it only visits objects that the tests create."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind counts remaining objects at exit


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add a worker's processes to the processes of this process, the controller."""
    node.config.stash[STARTED].count += getattr(node, "workeroutput", {}).get("processes", 0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["processes"] = session.config.stash[STARTED].count
    elif session.config.option.markexpr == QUICK and session.config.stash[STARTED].count > PROCESSES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    count, limit = config.stash[STARTED].count, PROCESSES if config.option.markexpr == QUICK else None
    if limit is not None and count > limit:
        terminalreporter.write_line(
            f"make test starts {count} processes, {limit} are allowed (tests/helpers/budget.py)", red=True
        )
    else:
        terminalreporter.write_line(f"{count} processes were started")
    if config.option.matrix_record:
        seconds = time.monotonic() - config.stash[BEGAN]
        write_record(config.option.matrix_record, terminalreporter.stats, seconds)
