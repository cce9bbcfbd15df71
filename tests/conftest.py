"""A small random Llama with a byte-level tokenizer: what most tests of the faces run on."""

import os
from contextlib import suppress
from pathlib import Path

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
from tests.helpers.builders import write_llama  # noqa: E402
from tests.helpers.small_tokenizers import byte_level, save  # noqa: E402


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


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[SequenceGroup]:
    """The requests that give their blocks up during the test, in order."""
    groups: list[SequenceGroup] = []
    restart = SequenceGroup.restart
    monkeypatch.setattr(SequenceGroup, "restart", lambda group: (groups.append(group), restart(group))[1])
    return groups
