"""Rows, and what a run makes of them, which is the same for every test."""

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
    """Return the folder of a run of these settings, which runs once."""

    @cache
    def run(*settings: str) -> Path:
        folder = tmp_path_factory.mktemp("run") / "run"
        done(start(data, folder, *settings))
        return folder

    return run
