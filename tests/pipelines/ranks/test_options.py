"""Ranks that add, and experts that are whole on one rank, in processes: their answers, their recorded steps, and a
resumed job."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.schema import ExpertPlacement, ParallelConfig, ParallelMode, RunConfig, Sum
from kernels import build
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import run_config, write_llama
from tests.helpers.catalog import write_family
from tests.helpers.command import refusal
from tests.helpers.command import run as run_command
from tests.helpers.divided_engines import answers, close
from tests.helpers.rank_runs import COMMAND, done, same_files, start, wait_for_rows

pytestmark = pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")

GREEDY = DecodeConfig(max_new_tokens=24)
REDUCE = ("parallel=tp", "parallel.tp=2", "parallel.sum=reduce")


def answers_of(run: RunConfig, **parallel: Any) -> list[Any]:
    """Return the answers twice; the second time from recorded steps."""
    engine = load_engine(replace(run, parallel=ParallelConfig(**parallel)), 3)
    first_answers = answers(engine, GREEDY)
    steps: Any = engine.executor.decode_steps
    assert steps.can_record
    assert steps.shapes
    assert answers(engine, GREEDY) == first_answers
    if parallel:
        close(engine)
    return first_answers


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_that_add_give_the_same_tokens(tp: int, tmp_path: Path) -> None:
    write_llama(tmp_path, num_hidden_layers=3)
    run = run_config(tmp_path)
    alone, added = answers_of(run), answers_of(run, mode=ParallelMode.tp, tp=tp, sum=Sum.reduce)
    assert token_ids(added) == token_ids(alone)


def token_ids(all_answers: list[Any]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in completions] for completions, _ in all_answers]


@pytest.mark.long
@pytest.mark.parametrize("sum", [Sum.gather, Sum.reduce])
def test_whole_experts(sum: Sum, tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral")
    run = run_config(tmp_path)
    alone = answers_of(run)
    expected = answers_of(run, mode=ParallelMode.tp, tp=2, experts=ExpertPlacement.whole, sum=sum)
    assert token_ids(expected) == token_ids(alone)
    assert sum is Sum.reduce or expected == alone


@pytest.mark.long
def test_stages_of_ranks_that_add(tmp_path: Path) -> None:
    write_llama(tmp_path, num_hidden_layers=3)
    run = run_config(tmp_path)
    added = answers_of(run, mode=ParallelMode.tp_pp, tp=2, pp=2, sum=Sum.reduce)
    assert token_ids(added) == token_ids(answers_of(run))


@pytest.mark.long
def test_runs_of_the_command(data: Path, run_of: Callable[..., Path], tmp_path: Path) -> None:
    """With the bundled model: two ranks that add give the same files in shared memory and over TCP."""
    done(start(data, tmp_path / "run", *REDUCE, "parallel.backend=gloo"))
    assert same_files(tmp_path / "run", run_of(*REDUCE))


@pytest.mark.long
def test_a_job_continues_with_the_same_sums_alone(data: Path, run_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = (*COMMAND[1:], f"predict.data={data}", f"predict.resume={folder}")
    process = start(data, folder, *REDUCE)
    journal = folder / "journal.jsonl"
    wait_for_rows(process, folder)
    process.kill()
    process.communicate()
    assert json.loads(journal.read_text().splitlines()[0])["parallel.sum"] == "reduce, tp=2"
    for other, now in (((), "null"), (("parallel=tp", "parallel.tp=3", "parallel.sum=reduce"), '"reduce, tp=3"')):
        ended = run_command(*settings, *other)
        assert ended.returncode == 1
        assert (
            f'these values changed: parallel.sum ("reduce, tp=2" -> {now}). Restore the old values, or begin again'
            in ended.stderr
        )
    assert run_command(*settings, *REDUCE).returncode == 0
    assert same_files(folder, run_of(*REDUCE))


def test_whole_experts_of_a_model_without_any_are_one_line(tmp_path: Path) -> None:
    said = refusal(tmp_path / "run", "parallel=tp", "parallel.tp=2", "parallel.experts=whole", "device=cpu")
    assert said == "parallel.experts=whole needs a mixture of experts, which this model does not have: leave it out"
