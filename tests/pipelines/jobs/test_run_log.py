"""run.log: a run's own log in its folder."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from conf.compose import dump
from conf.errors import UserError
from conf.schema import RunConfig
from pipelines.jobs import report
from pipelines.jobs.run_log import log_engine_in, log_folder, log_of_rank, run_log

log = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers = before


def ending(folder: Path, error: BaseException | None) -> str:
    """Return the log of a run that ends like this."""
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, run_log("predict", folder):
        log.warning("before the folder: \x1b[31m")
        assert log_folder() is None
        report.write_run(folder, dump(RunConfig(), folder), {})
        assert log_folder() == folder
        log.error("after it")
        log_of_rank(1, "said by rank 1")
        if error is not None:
            raise error
    return (folder / "run.log").read_text()


def test_a_run_logs_in_its_folder(tmp_path: Path) -> None:
    begun, warned, failed, finished = ending(tmp_path / "a", None).splitlines()
    assert "INFO: process " in begun
    assert warned.endswith(r"WARNING: before the folder: \x1b[31m")
    assert failed.endswith("ERROR: after it")
    assert "INFO: finished after " in finished
    assert (tmp_path / "a" / "run.rank1.log").read_text() == "said by rank 1\n"
    assert ending(tmp_path / "b", UserError("give more")).endswith(" s by UserError: give more\n")
    assert "Traceback" in (text := ending(tmp_path / "c", KeyError("x")))
    assert text.endswith("KeyError: 'x'\n\n")
    ending(tmp_path / "a", None)  # a job that continues in its folder
    assert len((tmp_path / "a" / "run.log").read_text().splitlines()) == 8


def test_a_run_without_a_folder_leaves_no_log(tmp_path: Path) -> None:
    with pytest.raises(UserError), run_log("predict", tmp_path / "run"):
        raise UserError("before anything is written")
    assert not any(tmp_path.iterdir())
    log_of_rank(1, "which has no log")
    with pytest.raises(KeyError), run_log("quantize", tmp_path / "run"):
        raise KeyError("x")
    assert (tmp_path / "run" / "run.log").read_text().endswith("KeyError: 'x'\n\n")


def test_the_log_of_an_engine_and_of_a_folder_that_is_gone(tmp_path: Path) -> None:
    log_engine_in(tmp_path)
    log.warning("a step")
    begun, warned = (tmp_path / "run.engine.log").read_text().splitlines()
    assert "begins" in begun
    assert warned.endswith("WARNING: a step")
    log_engine_in(tmp_path / "gone")
    log.warning("another")
    assert not (tmp_path / "gone").exists()
