"""The rows of a job, and runs that several tests compare with; each of them runs once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.rank_runs import done, start, write_prompts


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("data") / "rows.txt")


@pytest.fixture(scope="session")
def run_of(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that runs the job once with some settings, and returns the folder of that run."""

    @cache
    def run(*settings: str) -> Path:
        folder = tmp_path_factory.mktemp("run") / "run"
        done(start(data, folder, *settings))
        return folder

    return run
