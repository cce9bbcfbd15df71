"""Fixtures of the whole suite, and what a run of it may cost: the number of processes is counted and has a limit."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

with suppress(ModuleNotFoundError):  # an image with a GPU need not have it
    from hypothesis import settings

    # What a property is tried with is the same in every run; what fails is printed, and fails again. A busy machine fails nothing.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")

# Before torch is imported: a second thread has nothing to do in models of this size, and on a busy machine it keeps the first waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

# Before triton is imported: without a GPU its kernels are interpreted. tests/kernels/triton/test_compiled.py compiles them elsewhere.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kernels import build  # noqa: E402
from pipelines.engine.request import SequenceGroup  # noqa: E402
from tests.helpers import fork_server  # noqa: E402
from tests.helpers.budget import PROCESSES, QUICK, ProcessCount  # noqa: E402
from tests.helpers.builders import write_llama  # noqa: E402
from tests.helpers.exports import Exports  # noqa: E402
from tests.helpers.matrix_record import write_record  # noqa: E402
from tests.helpers.small_tokenizers import byte_level, save  # noqa: E402

STARTED, BEGAN = pytest.StashKey[ProcessCount](), pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix-record", type=Path, help="write date, revision and result of this run to a file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED], config.stash[BEGAN] = ProcessCount(), time.monotonic()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        fork_server.install()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add a worker's processes to those of this process, the controller."""
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


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random tensors of a test are the same whichever tests ran before it, so that a failure fails again."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """The kernels are compiled before any test: a process that a test starts would say so if it had to do it."""
    build.library()


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder: vocabulary 330, context 128, eos </s>; random, so its text is any bytes."""
    folder = tmp_path_factory.mktemp("chatty")
    tokenizer = byte_level()
    write_llama(folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=1, bos_token_id=0)
    (folder / "generation_config.json").unlink()
    save(tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Exported models, which all workers of a session share."""
    base = tmp_path_factory.getbasetemp()
    return Exports((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exports")


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[SequenceGroup]:
    """The requests that give their blocks up during the test, in order."""
    groups: list[SequenceGroup] = []
    restart = SequenceGroup.restart
    monkeypatch.setattr(SequenceGroup, "restart", lambda group: (groups.append(group), restart(group))[1])
    return groups
