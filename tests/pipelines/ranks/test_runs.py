"""Runs of several ranks from the command line, and their launchers."""

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kernels import build
from tests.helpers.command import run
from tests.helpers.rank_runs import done, same_files, start
from tests.helpers.waiting import LIMIT_S

pytestmark = [pytest.mark.long, pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")]

TP = ("parallel=tp", "parallel.tp=2")
PP = ("parallel=pp", "parallel.pp=2")
TP_PP = ("parallel=tp_pp", "parallel.tp=2", "parallel.pp=2")
each_division = pytest.mark.parametrize(
    "how",
    [pytest.param(TP, marks=pytest.mark.matrix), pytest.param(PP, marks=pytest.mark.matrix), TP_PP],
    ids=["tp", "pp", "tp_pp"],
)


WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.1, "seed": 7, "n": 3},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    {"num_beams": 3, "num_return_sequences": 2},
    {"penalty_alpha": 0.6, "top_k": 4},
]


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows for each setting, with a common prefix."""
    file = tmp_path_factory.mktemp("ways") / "rows.jsonl"
    rows = [{"prompt": f"Once upon a time there {verb}", "decode": way} for verb in ("was", "were") for way in WAYS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def finish(folder: Path, *asked: str) -> Path:
    ended = run(*asked, "device=cpu", f"hydra.run.dir={folder}")
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that runs a command once in one process, and returns the folder of that run."""
    return cache(lambda *asked: finish(tmp_path_factory.mktemp("alone") / "run", *asked))


@pytest.mark.parametrize("how", [TP, PP, TP_PP], ids=["tp", "pp", "tp_pp"])
def test_every_way_to_choose_tokens_gives_the_files_of_one_process(
    ways: Path, alone: Callable[..., Path], tmp_path: Path, how: tuple[str, ...]
) -> None:
    asked = ("decode.max_new_tokens=12", "predict.batch_size=4", f"predict.data={ways}")
    expected = alone(*asked)
    run = finish(tmp_path / "run", *asked, *how)
    assert same_files(run, expected)
    logs = sorted(file.name for file in run.glob("run*.log"))
    assert logs == ["run.log", *(f"run.rank{rank}.log" for rank in range(1, 4 if how is TP_PP else 2))]
    assert all("loads its part" in (run / name).read_text() for name in logs[1:])
    records = [json.loads(line) for line in (expected / "predictions.jsonl").read_text().splitlines()]
    assert [record["error"] for record in records] == [None] * 2 * len(WAYS)
    assert [len(record.get("completions", [record])) for record in records] == [1, 1, 3, 1, 2, 1] * 2


@each_division
def test_evaluate_gives_the_numbers_of_one_process(
    data: Path, alone: Callable[..., Path], tmp_path: Path, how: tuple[str, ...]
) -> None:
    asked = ("task=evaluate", f"evaluate.data={data}")
    expected, actual = (metrics_of(folder) for folder in (alone(*asked), finish(tmp_path / "run", *asked, *how)))
    assert actual["nll_per_token"] == expected["nll_per_token"]
    assert actual["num_scored_tokens"] == expected["num_scored_tokens"]


@each_division
def test_embed_gives_the_vectors_of_one_process(
    data: Path, alone: Callable[..., Path], tmp_path: Path, how: tuple[str, ...]
) -> None:
    asked = ("task=embed", f"predict.data={data}")
    name = "embeddings.npy"
    assert (finish(tmp_path / "run", *asked, *how) / name).read_bytes() == (alone(*asked) / name).read_bytes()


@each_division
def test_bench_counts_all_ranks(alone: Callable[..., Path], tmp_path: Path, how: tuple[str, ...]) -> None:
    sizes = ("bench.prompt_tokens=8", "bench.new_tokens=4", "bench.batch_size=2", "bench.repeats=1")
    asked = ("task=bench", *sizes)
    expected, divided = (metrics_of(folder) for folder in (alone(*asked), finish(tmp_path / "run", *asked, *how)))
    assert divided["decode_tokens_per_s"] > 0
    assert divided["kv_bytes"] == expected["kv_bytes"]
    # Each rank is a process with its own torch, which is most of the memory for this model.
    assert divided["peak_memory_bytes"] > 1.5 * expected["peak_memory_bytes"]
    # Each rank has copies of the norms, and the last stage also of a tied embedding.
    assert expected["weight_bytes"] <= divided["weight_bytes"] < 1.3 * expected["weight_bytes"]


def metrics_of(folder: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics


SRUN = {
    **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"},
}


def test_the_same_command_joins_the_ranks_of_torchrun(data: Path, run_of: Callable[..., Path], tmp_path: Path) -> None:
    """Two torchrun processes at once, started as the module behind the command."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    folders = [tmp_path / "0", tmp_path / "1"]
    for process in [
        start(data, folders[i], f"parallel={mode}", launcher=torchrun) for i, mode in enumerate(("tp", "pp"))
    ]:
        done(process)
    assert all(same_files(folder, run_of()) for folder in folders)


@pytest.mark.parametrize("mode", ["tp", pytest.param("pp", marks=pytest.mark.matrix)])
def test_the_same_command_joins_the_ranks_of_srun(
    data: Path, run_of: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    """Slurm is not installed; the environment is as srun sets it."""
    names = SRUN | {"SLURM_JOB_ID": str(os.getpid())}
    folders = [tmp_path / "0", tmp_path / "1"]
    ranks = [
        start(data, folders[r], f"parallel={mode}", **names, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)) for r in (1, 0)
    ]
    for rank in ranks:
        done(rank)
    assert same_files(folders[0], run_of())
    assert not folders[1].exists()


def test_another_number_of_ranks_than_a_launcher_has_started_is_one_line(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", "parallel=tp", "parallel.tp=3", **SRUN, SLURM_PROCID="0", SLURM_LOCALID="0")
    _, errors = process.communicate(timeout=LIMIT_S)
    wanted = "srun started 2 processes, but parallel.tp=3 has 3: give parallel=tp parallel.tp=2, or start 3"
    assert (process.returncode, errors) == (1, f"error: {wanted}\n")


def test_a_plain_batch_script_of_slurm_has_no_other_ranks(data: Path, tmp_path: Path) -> None:
    done(start(data, tmp_path / "run", SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_PROCID="0"))
    assert len((tmp_path / "run" / "predictions.jsonl").read_text().splitlines()) == 24
