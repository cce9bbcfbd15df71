"""Ranks over TCP: the files of one process, two machines simulated on one, and messages about lost ranks."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import build
from pipelines.ranks.launch import joined
from tests.helpers.builders import REPOSITORY
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

GLOO = "parallel.backend=gloo"
TP = ("parallel=tp", "parallel.tp=2", GLOO)
PP = ("parallel=pp", "parallel.pp=2", GLOO)
TP_PP = ("parallel=tp_pp", "parallel.tp=2", "parallel.pp=2", GLOO)


# the test of srun has pp, the test of torchrun tp_pp
@pytest.mark.parametrize(
    "how", [TP, *(pytest.param(how, marks=pytest.mark.matrix) for how in (PP, TP_PP))], ids=["tp", "pp", "tp_pp"]
)
def test_ranks_over_tcp_give_the_files_of_one_process(
    data: Path, run_of: Callable[..., Path], tmp_path: Path, how: tuple[str, ...]
) -> None:
    assert done(start(data, tmp_path / "run", *how)) == ""
    assert same_files(tmp_path / "run", run_of())


@pytest.mark.parametrize(
    ("number", "how", "rank"),
    [
        (signal.SIGKILL, TP, 1),
        pytest.param(signal.SIGSTOP, TP, 1, marks=pytest.mark.matrix),
        pytest.param(signal.SIGKILL, TP_PP, 2, marks=pytest.mark.matrix),
        (signal.SIGSTOP, TP_PP, 3),
    ],
    ids=["killed beside rank 0", "stopped beside rank 0", "killed in the last stage", "stopped in the last stage"],
)
def test_a_lost_rank_is_one_line_and_the_job_continues(
    data: Path, run_of: Callable[..., Path], tmp_path: Path, number: signal.Signals, how: tuple[str, ...], rank: int
) -> None:
    folder = tmp_path / "run"
    process = start(data, folder, *how, f"parallel.heartbeat_s={HEARTBEAT_S}")
    workers = workers_of(process, 1 if how == TP else 3)
    wait_for_rows(process, folder)
    lose(process, workers, rank, number)
    # as one process: the parallel layout does not change the rows
    done(start(data, folder, f"predict.resume={folder}"))
    assert same_files(folder, run_of())


def test_a_rank_that_is_killed_while_it_loads_is_one_line(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", *TP_PP)
    workers = workers_of(process, 3)
    assert lose(process, workers, 2, signal.SIGKILL).endswith("(SIGKILL, out of memory?)")


def test_the_ranks_end_with_rank_0(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", *TP_PP)
    workers = workers_of(process, 3)
    wait_for_rows(process, tmp_path / "run")
    began = time.monotonic()
    process.kill()
    process.communicate()
    until(lambda: are_gone(workers))
    assert time.monotonic() - began < END_S


def free_port() -> int:
    """Return a port whose successor is free, too: torchrun uses the first for its rendezvous, the ranks the second."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


def torchrun(node: int, port: int, per_node: int = 1) -> tuple[str, ...]:
    program = (sys.executable, "-m", "torch.distributed.run")  # the same as the command torchrun
    where = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    return (*program, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(per_node), *where)


@pytest.mark.parametrize(
    ("per_node", "how"),
    [pytest.param(1, ("parallel=pp",), marks=pytest.mark.matrix), (2, TP_PP)],
    ids=["stages by default", "layers by name"],
)
def test_torchrun_on_two_machines_gives_the_files_of_one_process(
    data: Path, run_of: Callable[..., Path], tmp_path: Path, per_node: int, how: tuple[str, ...]
) -> None:
    """The same command runs on each. Only rank 0 has a folder."""
    port, folders = free_port(), [tmp_path / "0", tmp_path / "1"]
    nodes = [start(data, folders[node], *how, launcher=torchrun(node, port, per_node)) for node in range(2)]
    for node in nodes:
        done(node)
    assert same_files(folders[0], run_of())
    assert not folders[1].exists()


def srun(rank: int) -> dict[str, str]:
    """Return the environment of one of two tasks on two nodes, as srun sets it, because Slurm is not installed. Each
    test process uses another job id."""
    names = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    nodes = {"SLURM_STEP_NODELIST": "localhost,other", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    return names | nodes | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}


def test_srun_on_two_machines_gives_the_files_of_one_process(
    data: Path, run_of: Callable[..., Path], tmp_path: Path
) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for rank in [start(data, folders[rank], "parallel=pp", **srun(rank)) for rank in (1, 0)]:
        done(rank)
    assert same_files(folders[0], run_of())
    assert not folders[1].exists()


def stopped_while_it_listens(data: Path, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Return rank 0 of two machines, stopped after it listens, as if its model took long to load."""
    context = joined(srun(0))
    assert context is not None
    assert context.address is not None
    port = f":{context.address[1]:04X} "
    rank = start(data, folder, "parallel=pp", *arguments, **srun(0))
    until(lambda: any(port in line and " 0A " in line for line in Path("/proc/net/tcp").read_text().splitlines()))
    rank.send_signal(signal.SIGSTOP)
    return rank


def test_a_rank_waits_aloud_for_as_long_as_rank_0_is_there(
    data: Path, run_of: Callable[..., Path], tmp_path: Path
) -> None:
    first = stopped_while_it_listens(data, tmp_path / "0")
    second = start(data, tmp_path / "1", "parallel=pp", **srun(1))
    assert second.stderr is not None
    line = second.stderr.readline()
    reason = "it finds, downloads or calibrates the model first"
    assert line == f"rank 1 waits for rank 0, which has not begun to load: {reason}\n"
    first.send_signal(signal.SIGCONT)
    assert done(first) == done(second) == ""
    assert same_files(tmp_path / "0", run_of())


def test_a_rank_that_waits_ends_with_rank_0(data: Path, tmp_path: Path) -> None:
    first = stopped_while_it_listens(data, tmp_path / "0")
    second = start(data, tmp_path / "1", "parallel=pp", **srun(1))
    assert second.stderr is not None
    assert "waits for rank 0" in second.stderr.readline()
    began = time.monotonic()
    first.kill()
    first.communicate()
    second.communicate(timeout=LIMIT_S)
    assert time.monotonic() - began < END_S


def test_a_rank_that_waits_ends_where_a_setting_is_mistyped(data: Path, tmp_path: Path) -> None:
    """Only rank 0 composes the settings and reports the error."""
    first = stopped_while_it_listens(data, tmp_path / "0", "parallel.ppp=3")
    second = start(data, tmp_path / "1", "parallel=pp", "parallel.ppp=3", **srun(1))
    assert second.stderr is not None
    assert "waits for rank 0" in second.stderr.readline()
    began = time.monotonic()
    first.send_signal(signal.SIGCONT)
    _, errors = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 1
    assert "ppp" in errors
    assert len(errors.splitlines()) == 1
    assert second.communicate(timeout=LIMIT_S)[1] == ""
    assert time.monotonic() - began < END_S


def test_a_machine_with_another_model_is_one_line(data: Path, tmp_path: Path) -> None:
    """Each rank is in a separate folder, and the model's path is relative."""
    ranks = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        shutil.copytree(REPOSITORY / "models" / "tiny", folder / "model", ignore=shutil.ignore_patterns("*.py", "__*"))
        if rank:
            (folder / "model" / "config.json").write_text((folder / "model" / "config.json").read_text() + "\n")
        command = [
            sys.executable,
            str(REPOSITORY / "run.py"),
            "parallel=pp",
            "model.path=model",
            f"predict.data={data}",
        ]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, cwd=folder, env=os.environ | srun(rank), **pipes))  # type: ignore[call-overload]
    errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    name = f"rank 1 (process {ranks[1].pid} on {socket.gethostname()})"
    wanted = "has not what rank 0 has, but another model/config.json: give all machines the same files and versions"
    assert errors[0] == f"error: {name} {wanted}\n"


def test_layers_that_several_machines_share_have_to_be_asked_for(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", "parallel=tp", **srun(0))
    _, errors = process.communicate(timeout=LIMIT_S)
    wanted = "error: srun started 2 ranks on several machines, and parallel.tp=2 exchanges numbers several times in each layer: "
    assert process.returncode == 1
    assert errors.startswith(wanted + "give parallel=pp")
    assert len(errors.splitlines()) == 1
