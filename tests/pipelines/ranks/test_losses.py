"""Ranks that are lost, stopped and interrupted: the messages, the time until the end, and the files that are left. Real
processes."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import build
from tests.helpers.fork_server import true_starts
from tests.helpers.processes import processes
from tests.helpers.rank_runs import (
    END_S,
    HEARTBEAT_S,
    are_gone,
    done,
    lose,
    same_files,
    start,
    wait_for_rows,
    workers_of,
)
from tests.helpers.waiting import LIMIT_S, until

pytestmark = [pytest.mark.long, pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")]

THREE = ("parallel=tp", "parallel.tp=3")
TP_PP = ("parallel=tp_pp", "parallel.tp=2", "parallel.pp=2")
# Steps of one token each: 98 % of the steps compute a prompt.
PROMPTS = ("device.max_batched_tokens=1", "predict.batch_size=1", "decode.max_new_tokens=1")


@pytest.mark.parametrize(
    ("number", "how", "rank", "settings"),
    [
        (signal.SIGKILL, THREE, 1, ()),
        (signal.SIGKILL, THREE, 2, PROMPTS),
        (signal.SIGSTOP, THREE, 2, ()),
        pytest.param(signal.SIGKILL, TP_PP, 1, (), marks=pytest.mark.matrix),
        (signal.SIGKILL, TP_PP, 2, PROMPTS),
        pytest.param(signal.SIGKILL, TP_PP, 3, (), marks=pytest.mark.matrix),
    ],
    ids=[
        "killed in decode",
        "killed in a prompt",
        "stopped in decode",
        "beside rank 0",
        "the first of the last stage, in a prompt",
        "the second of the last stage",
    ],
)
def test_a_lost_rank_is_one_line_and_the_job_continues(
    data: Path,
    run_of: Callable[..., Path],
    tmp_path: Path,
    number: signal.Signals,
    how: tuple[str, ...],
    rank: int,
    settings: tuple[str, ...],
) -> None:
    lost = tmp_path / "lost"
    process = start(data, lost, *how, *settings, f"parallel.heartbeat_s={HEARTBEAT_S}")
    workers = workers_of(process, 2 if how == THREE else 3)
    wait_for_rows(process, lost)
    line = lose(process, workers, rank, number)
    assert f" rows are done and kept, go on with: python run.py predict.resume={lost}" in line
    again = how if rank == 1 else ()  # the parallel layout does not change the rows
    done(start(data, lost, *again, *settings, f"predict.resume={lost}"))
    assert same_files(lost, run_of(*settings))


@pytest.mark.parametrize(
    ("number", "how"),
    [pytest.param(signal.SIGKILL, THREE, marks=pytest.mark.matrix), (signal.SIGKILL, TP_PP), (signal.SIGSTOP, TP_PP)],
    ids=["killed, tp", "killed, tp_pp", "stopped, tp_pp"],
)
def test_a_rank_that_is_lost_while_it_loads_is_one_line(
    data: Path, tmp_path: Path, number: signal.Signals, how: tuple[str, ...]
) -> None:
    process = start(data, tmp_path / "run", *how, f"parallel.heartbeat_s={HEARTBEAT_S}")
    workers = workers_of(process, 2 if how == THREE else 3)
    end = "(SIGKILL, out of memory?)" if number == signal.SIGKILL else f"for {HEARTBEAT_S} s"
    assert lose(process, workers, 2, number).endswith(end)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("loading", [True, False])
def test_the_ranks_end_with_rank_0(data: Path, tmp_path: Path, loading: bool) -> None:
    process = start(data, tmp_path / "run", *THREE)
    workers = workers_of(process, 2)
    if not loading:
        wait_for_rows(process, tmp_path / "run")
    began = time.monotonic()
    process.kill()
    process.communicate()
    until(lambda: are_gone(workers))
    assert time.monotonic() - began < END_S


def test_an_interrupt_ends_all_ranks_between_two_steps(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", *THREE)
    workers = workers_of(process, 2)
    wait_for_rows(process, tmp_path / "run")
    for pid in (*workers, process.pid):  # a terminal sends it to all
        os.kill(pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert errors.startswith("interrupted: ")
    assert len(errors.splitlines()) == 1
    assert not processes().keys() & {*workers}


@true_starts()
def test_an_interrupt_while_ranks_load_ends_them(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", *THREE)
    workers = workers_of(process, 2)
    for pid in (*workers, process.pid):
        os.kill(pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (130, "interrupted\n")
    until(lambda: are_gone(workers))
    assert not (tmp_path / "run").exists()


def test_ranks_share_memory_without_a_name(data: Path, tmp_path: Path) -> None:
    """It is freed with the ranks, and does not use a small /dev/shm."""
    process = start(data, tmp_path / "run", *THREE)
    workers = workers_of(process, 2)
    wait_for_rows(process, tmp_path / "run")
    for pid in (process.pid, *workers):
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "/memfd:quintet-ranks (deleted)" in mapped
        assert "/dev/shm" not in mapped
    done(process)


def test_three_starts_at_once(data: Path, tmp_path: Path) -> None:
    row = tmp_path / "row.txt"
    row.write_text("Once upon a time")
    done(start(row, tmp_path / "whole", "decode.max_new_tokens=3"))
    folders = [tmp_path / str(number) for number in range(3)]
    how = ("decode.max_new_tokens=3", "parallel=tp", "parallel.tp=2")
    for process in [start(row, folder, *how) for folder in folders]:
        assert done(process) == ""
    assert all(same_files(folder, tmp_path / "whole") for folder in folders)
