"""Runs of several ranks from the command line, and how they are started."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels import build
from tests.helpers.command import run
from tests.helpers.rank_runs import done, same_files, start, write_prompts
from tests.helpers.waiting import LIMIT_S

pytestmark = [pytest.mark.long, pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")]

TP = ("parallel=tp", "parallel.tp=2")
PP = ("parallel=pp", "parallel.pp=2")
TP_PP = ("parallel=tp_pp", "parallel.tp=2", "parallel.pp=2")
each_division = pytest.mark.parametrize("how", [TP, PP, TP_PP], ids=["tp", "pp", "tp_pp"])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "rows.txt")


WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.1, "seed": 7, "n": 3},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    {"num_beams": 3, "num_return_sequences": 2},
    {"penalty_alpha": 0.6, "top_k": 4},
]


@each_division
def test_every_way_to_choose_tokens_gives_the_files_of_one_process(tmp_path: Path, how: tuple[str, ...]) -> None:
    """Two rows of each, which begin alike."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Once upon a time there {verb}", "decode": way} for verb in ("was", "were") for way in WAYS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("device=cpu", "decode.max_new_tokens=12", "predict.batch_size=4", f"predict.data={data}")
    for name, division in (("alone", ()), ("divided", how)):
        ended = run(*asked, *division, f"hydra.run.dir={tmp_path / name}")
        assert ended.returncode == 0, ended.stderr
    assert same_files(tmp_path / "divided", tmp_path / "alone")
    found = [json.loads(line) for line in (tmp_path / "alone" / "predictions.jsonl").read_text().splitlines()]
    assert [each["error"] for each in found] == [None] * len(rows)
    assert [len(each.get("completions", [each])) for each in found] == [1, 1, 3, 1, 2, 1] * 2


@each_division
def test_evaluate_gives_the_numbers_of_one_process(data: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    asked = ("task=evaluate", "device=cpu", f"evaluate.data={data}")
    found = []
    for name, division in (("alone", ()), ("divided", how)):
        ended = run(*asked, *division, f"hydra.run.dir={tmp_path / name}")
        assert ended.returncode == 0, ended.stderr
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        found.append((metrics["nll_per_token"], metrics["num_scored_tokens"]))
    assert found[0] == found[1]


@each_division
def test_embed_gives_the_vectors_of_one_process(data: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    asked = ("task=embed", "device=cpu", f"predict.data={data}")
    for name, division in (("alone", ()), ("divided", how)):
        ended = run(*asked, *division, f"hydra.run.dir={tmp_path / name}")
        assert ended.returncode == 0, ended.stderr
    alone, divided = ((tmp_path / name / "embeddings.npy").read_bytes() for name in ("alone", "divided"))
    assert alone == divided


@each_division
def test_bench_counts_all_ranks(tmp_path: Path, how: tuple[str, ...]) -> None:
    sizes = ("bench.prompt_tokens=8", "bench.new_tokens=4", "bench.batch_size=2", "bench.repeats=1")
    found = []
    for name, division in (("alone", ()), ("divided", how)):
        ended = run("task=bench", "device=cpu", *division, *sizes, f"hydra.run.dir={tmp_path / name}")
        assert ended.returncode == 0, ended.stderr
        found.append(json.loads((tmp_path / name / "metrics.json").read_text()))
    alone, divided = found
    assert divided["decode_tokens_per_s"] > 0
    assert divided["kv_bytes"] == alone["kv_bytes"]
    # Each rank is a process with a torch of its own, which is most of what this model needs.
    assert divided["peak_memory_bytes"] > 1.5 * alone["peak_memory_bytes"]
    # Ranks have norms of their own, and the last stage has a tied embedding, too.
    assert alone["weight_bytes"] <= divided["weight_bytes"] < 1.3 * alone["weight_bytes"]


SRUN = {
    **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"},
}


def test_the_same_command_joins_the_ranks_of_torchrun(data: Path, tmp_path: Path) -> None:
    """Torchrun itself, twice at once."""
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2")
    folders = [tmp_path / "0", tmp_path / "1"]
    for process in [
        start(data, folders[i], f"parallel={mode}", launcher=torchrun) for i, mode in enumerate(("tp", "pp"))
    ]:
        done(process)
    done(start(data, tmp_path / "whole"))
    assert all(same_files(folder, tmp_path / "whole") for folder in folders)


@pytest.mark.parametrize("mode", ["tp", "pp"])
def test_the_same_command_joins_the_ranks_of_srun(data: Path, tmp_path: Path, mode: str) -> None:
    """There is no Slurm here: the environment is as srun makes it."""
    names = SRUN | {"SLURM_JOB_ID": str(os.getpid())}
    folders = [tmp_path / "0", tmp_path / "1"]
    ranks = [
        start(data, folders[r], f"parallel={mode}", **names, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)) for r in (1, 0)
    ]
    for rank in ranks:
        done(rank)
    done(start(data, tmp_path / "whole"))
    assert same_files(folders[0], tmp_path / "whole")
    assert not folders[1].exists()


def test_another_number_of_ranks_than_a_launcher_has_started_is_one_line(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", "parallel=tp", "parallel.tp=3", **SRUN, SLURM_PROCID="0", SLURM_LOCALID="0")
    _, errors = process.communicate(timeout=LIMIT_S)
    wanted = "srun started 2 processes, but parallel.tp=3 has 3: give parallel=tp parallel.tp=2, or start 3"
    assert (process.returncode, errors) == (1, f"error: {wanted}\n")


def test_a_plain_batch_script_of_slurm_has_no_other_ranks(data: Path, tmp_path: Path) -> None:
    done(start(data, tmp_path / "run", SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_PROCID="0"))
    assert len((tmp_path / "run" / "predictions.jsonl").read_text().splitlines()) == 24
