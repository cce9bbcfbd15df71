"""Runs of several ranks from the command line: how they are started, and what is left when one is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import build
from tests.helpers.builders import REPOSITORY
from tests.helpers.command import run
from tests.helpers.processes import processes

pytestmark = [pytest.mark.long, pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")]

TP = ("parallel=tp", "parallel.tp=2")
DEADLINE_S = 120.0  # for what a busy machine does in seconds
RESULTS = ("predictions.jsonl", "text_generation_result.txt")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.txt"
    file.write_text("".join(f"Once upon a time there were {i} cats. " * 8 + "\n" for i in range(24)))
    return file


def start(data: Path, folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "run.py", "decode=sampling", "decode.seed=3", "decode.max_new_tokens=60", *arguments]
    command += [f"predict.data={data}", "predict.batch_size=2", f"hydra.run.dir={folder}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=REPOSITORY, text=True, env={**os.environ, **environment}, **pipes)  # type: ignore[call-overload, no-any-return]


def done(process: "subprocess.Popen[str]") -> str:
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    return str(errors)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def worker_of(process: "subprocess.Popen[str]") -> int:
    """The one rank that the process has started; waits for it."""
    found: list[int] = []

    def there() -> bool:
        known = processes().items()
        found[:] = [pid for pid, (parent, command) in known if parent == process.pid and "ranks.worker" in command]
        return bool(found)

    until(there)
    return found[0]


def wait_for_rows(process: "subprocess.Popen[str]", folder: Path) -> None:
    journal = folder / "journal.jsonl"
    until(lambda: process.poll() is not None or (journal.exists() and journal.read_bytes().count(b"\n") > 2))
    assert process.poll() is None


def same_files(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in RESULTS)


def test_evaluate_gives_the_numbers_of_one_process(data: Path, tmp_path: Path) -> None:
    asked = ("task=evaluate", "device=cpu", f"evaluate.data={data}")
    found = []
    for name, how in (("alone", ()), ("divided", TP)):
        ended = run(*asked, *how, f"hydra.run.dir={tmp_path / name}")
        assert ended.returncode == 0, ended.stderr
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        found.append((metrics["nll_per_token"], metrics["num_scored_tokens"]))
    assert found[0] == found[1]


def test_embed_gives_the_vectors_of_one_process(data: Path, tmp_path: Path) -> None:
    asked = ("task=embed", "device=cpu", f"predict.data={data}")
    for name, how in (("alone", ()), ("divided", TP)):
        ended = run(*asked, *how, f"hydra.run.dir={tmp_path / name}")
        assert ended.returncode == 0, ended.stderr
    alone, divided = ((tmp_path / name / "embeddings.npy").read_bytes() for name in ("alone", "divided"))
    assert alone == divided


def test_bench_runs_on_ranks(tmp_path: Path) -> None:
    sizes = ("bench.prompt_tokens=8", "bench.new_tokens=4", "bench.batch_size=2", "bench.repeats=1")
    ended = run("task=bench", "device=cpu", *TP, *sizes, f"hydra.run.dir={tmp_path / 'run'}")
    assert ended.returncode == 0, ended.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["decode_tokens_per_s"] > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_one_line_and_the_job_goes_on(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    lost, whole = tmp_path / "lost", tmp_path / "whole"
    process = start(data, lost, *TP, "parallel.heartbeat_s=5")
    worker = worker_of(process)
    wait_for_rows(process, lost)
    os.kill(worker, number)
    began = time.monotonic()
    _, errors = process.communicate(timeout=DEADLINE_S)
    took = time.monotonic() - began
    assert process.returncode == 1
    (line,) = errors.splitlines()
    how = "was ended by signal 9 (SIGKILL, out of memory?)" if number == signal.SIGKILL else "has been silent for 5 s"
    assert line.startswith(f"error: rank 1 (process {worker}) {how}; ")
    assert f"rows are done and kept, go on with: python run.py predict.resume={lost}" in line
    assert took < (10 if number == signal.SIGKILL else 20)  # 5 and 10, on a machine with nothing else to do
    assert worker not in processes()
    done(start(data, whole))
    done(start(data, lost, *TP, f"predict.resume={lost}"))
    assert same_files(lost, whole)


def test_a_rank_that_is_killed_while_it_loads_is_one_line(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", *TP)
    worker = worker_of(process)
    os.kill(worker, signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert errors == f"error: rank 1 (process {worker}) was ended by signal 9 (SIGKILL, out of memory?)\n"


def test_the_ranks_end_with_rank_0(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", *TP)
    worker = worker_of(process)
    wait_for_rows(process, tmp_path / "run")
    process.kill()
    process.communicate()
    until(lambda: "ranks.worker" not in processes().get(worker, (0, ""))[1])


def test_an_interrupt_ends_all_ranks_between_two_steps(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", *TP)
    worker = worker_of(process)
    wait_for_rows(process, tmp_path / "run")
    for pid in (worker, process.pid):  # a terminal sends it to both
        os.kill(pid, signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert errors.startswith("interrupted: ")
    assert len(errors.splitlines()) == 1
    assert worker not in processes()


LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "JOB", "MASTER_PORT": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    "srun": {"SLURM_JOB_ID": "JOB", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"},
}
RANK = {"torchrun": "RANK", "srun": "SLURM_PROCID"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_command_joins_the_ranks_of_a_launcher(data: Path, tmp_path: Path, launcher: str) -> None:
    names = {name: value.replace("JOB", str(os.getpid())) for name, value in LAUNCHERS[launcher].items()}
    folders = [tmp_path / "0", tmp_path / "1"]
    ranks = [start(data, folders[r], "parallel=tp", **names, **{RANK[launcher]: str(r)}) for r in (1, 0)]
    for rank in ranks:
        done(rank)
    done(start(data, tmp_path / "whole"))
    assert same_files(folders[0], tmp_path / "whole")
    assert not folders[1].exists()


def test_another_number_of_ranks_than_a_launcher_has_started_is_one_line(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", "parallel=tp", "parallel.tp=3", **LAUNCHERS["srun"], SLURM_PROCID="0")
    _, errors = process.communicate(timeout=DEADLINE_S)
    wanted = "srun started 2 processes, but parallel.tp=3 has 3: give parallel=tp parallel.tp=2, or start 3"
    assert (process.returncode, errors) == (1, f"error: {wanted}\n")


def test_a_plain_batch_script_of_slurm_has_no_other_ranks(data: Path, tmp_path: Path) -> None:
    done(start(data, tmp_path / "run", SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_PROCID="0"))
