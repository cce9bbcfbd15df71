"""Fixtures of the whole suite. tests/conftest.py loads them only in processes that run tests; the controller of workers
starts without torch."""

import fcntl
import os
from pathlib import Path

import pytest
import torch

# Before triton is imported: without a GPU its kernels are interpreted. tests/kernels/triton/test_compiled.py compiles
# them elsewhere.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kernels import build  # noqa: E402
from models.exported.runner.build import PROGRAM, build_runner  # noqa: E402
from pipelines.engine.request import SequenceGroup  # noqa: E402
from tests.helpers.builders import write_llama  # noqa: E402
from tests.helpers.exports import Exports  # noqa: E402
from tests.helpers.small_tokenizers import byte_level, save  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed the random tensors of a test, so that they do not depend on earlier tests and a failure can be repeated."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile the kernels before any test. Otherwise a process that a test starts would print that it compiles them."""
    build.library()


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random checkpoint: vocabulary 330, context 128, eos </s>. Its text is arbitrary bytes."""
    folder = tmp_path_factory.mktemp("chatty")
    tokenizer = byte_level()
    write_llama(folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=1, bos_token_id=0)
    (folder / "generation_config.json").unlink()
    save(tokenizer, folder)
    return folder


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all workers of a session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Return the exports that all workers of a session share."""
    return Exports(shared_folder(tmp_path_factory) / "exports")


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the C++ runner, which all workers of a session share. It is moved after the build, with its library."""
    folder = shared_folder(tmp_path_factory) / "runner"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
        if not (folder / "moved").exists():
            build_runner(folder / "built")
            (folder / "built").rename(folder / "moved")
    return folder / "moved" / PROGRAM


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[SequenceGroup]:
    """Return the requests that are preempted during the test, in order."""
    groups: list[SequenceGroup] = []
    restart = SequenceGroup.restart
    monkeypatch.setattr(SequenceGroup, "restart", lambda group: (groups.append(group), restart(group))[1])
    return groups
