"""Jobs of vectors and scores that ended in any way continue, and write the files of uninterrupted jobs."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import dump
from conf.errors import UserError
from conf.pooling import EmbedConfig, PoolingMode
from conf.schema import ModelConfig, RunConfig, Task
from conf.tasks import PredictConfig
from pipelines.jobs import journal
from pipelines.tasks.embed import run_embed
from pipelines.tasks.predict import run_predict
from pipelines.tasks.score import run_score
from tests.helpers.builders import REPOSITORY, run_config
from tests.helpers.cases import each
from tests.helpers.embedding_models import write_qwen3_embedding, write_qwen3_reranker

NUM_ROWS = 9

# Kills a job at a given call with an uncatchable signal. Every job is a fork of a process that has only imported
# modules.
DRIVER = """
import json, os, sys
from pathlib import Path
from conf.compose import dump
from conf.pooling import EmbedConfig, PoolingMode
from conf.schema import DeviceConfig, DeviceType, ModelConfig, RunConfig, Task
from conf.tasks import PredictConfig
from models.tokenizers import load_tokenizer
from pipelines.tasks.embed import run_embed
from pipelines.tasks.score import run_score
from pipelines.jobs.journal import Journal
from tests.helpers import kill

model, data, base, task, pooling, moments = json.loads(sys.argv[1])
device = DeviceConfig(DeviceType.cpu, threads=1)
config = RunConfig(Task[task], ModelConfig(path=model), device=device, embed=EmbedConfig(PoolingMode[pooling]))
load_tokenizer(Path(model))  # for all that this imports


def run(folder, resume, moment=None):
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        if moment:
            place, number = moment
            kill.before({"append": Journal, "write": os, "replace": os, "remove": Journal}[place], place, number)
        predict = PredictConfig(data=data, batch_size=3, resume=resume)
        {"embed": run_embed, "score": run_score}[task](RunConfig(**{**vars(config), "predict": predict}), Path(folder), dump)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


ends = [run(f"{base}/whole", "auto")]
for i, moment in enumerate(moments):
    folder = f"{base}/{i}"
    ends += [run(folder, "auto", moment), run(folder, folder if i % 2 else "auto")]
json.dump(ends, sys.stdout)
"""
# The rename calls are for config.yaml, environment.json, the RESULTS and metrics.json, in this order.
MOMENTS = [("write", 1), ("append", 1), ("append", 5), ("write", 7), ("append", NUM_ROWS), ("replace", 1), ("replace", 3),
           ("replace", 4), ("replace", 5), ("remove", 1)]  # fmt: skip
RESULTS = {"embed": ("embeddings.npy", "rows.jsonl"), "score": ("scores.jsonl",)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "Once upon a time " * (1 + i % 3), "id": i} for i in range(NUM_ROWS)]
    rows[4] = {"promt": "a bad row"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "pooling"),
    [("embed", "mean"), pytest.param("embed", "last", marks=pytest.mark.matrix), ("score", "last")],
)
def test_killed_at_any_moment_it_leaves_what_an_uninterrupted_job_leaves(
    chatty: Path, tmp_path: Path, data: Path, task: str, pooling: str
) -> None:
    model, moments = chatty, MOMENTS
    if task == "score":  # pairs of an embedding model
        write_qwen3_embedding(model := tmp_path / "model")
        moments = [moment for moment in MOMENTS if moment != ("replace", 5)]
        rows = [json.loads(line) for line in data.read_text().splitlines()]
        pairs = [row | {"query": row.pop("prompt"), "document": f"{row}"} if "prompt" in row else row for row in rows]
        data.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    arguments = json.dumps([str(model), str(data), str(tmp_path), task, pooling, moments])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert json.loads(done.stdout) == [0] + [-signal.SIGKILL, 0] * len(moments)
    names = {file.name for file in (tmp_path / "whole").iterdir()}
    assert names == {*RESULTS[task], "metrics.json", "config.yaml", "environment.json"}
    for i, moment in enumerate(moments):
        for name in RESULTS[task]:
            assert (tmp_path / str(i) / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), moment
        assert {file.name for file in (tmp_path / str(i)).iterdir()} == names, moment
    ends = 0, 2, len(moments) - 1
    resumed = [json.loads((tmp_path / str(i) / "metrics.json").read_text())["num_resumed_rows"] for i in ends]
    assert resumed == [0, 4, NUM_ROWS]


def job(folder: Path, data: Path, task: Task, **predict: Any) -> RunConfig:
    run = replace(run_config(folder), task=task, predict=PredictConfig(data=str(data), batch_size=3, **predict))
    return replace(run, model=ModelConfig(path=str(folder)))


@each("write", [write_qwen3_reranker, write_qwen3_embedding])
def test_scores_go_on_and_the_command_says_how(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"query": "What?", "document": "one " * i} for i in range(5)]
    rows[3] = {"query": "no document"}
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_score(job(tmp_path / "model", data, Task.score), tmp_path / "whole", dump)
    with pytest.raises(
        UserError, match=r"row 3: the row has a query and no document: give both; . rows are done and kept"
    ):
        run_score(job(tmp_path / "model", data, Task.score, max_errors=0), tmp_path / "out", dump)
    resumed = job(tmp_path / "model", data, Task.score, resume=str(tmp_path / "out"))
    if write is write_qwen3_embedding:
        with pytest.raises(UserError, match=r"because these values changed: .*embed.normalize \(true -> false\)"):
            run_score(replace(resumed, embed=EmbedConfig(normalize=False)), tmp_path / "unused", dump)
    run_score(resumed, tmp_path / "unused", dump)
    assert (tmp_path / "out" / "scores.jsonl").read_bytes() == (tmp_path / "whole" / "scores.jsonl").read_bytes()
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["num_resumed_rows"] > 0


def test_another_pooling_is_another_job(chatty: Path, tmp_path: Path, data: Path) -> None:
    run = job(chatty, data, Task.embed, max_errors=0)
    with pytest.raises(UserError, match="more than predict.max_errors=0 rows failed"):
        run_embed(run, tmp_path / "out", dump)
    assert (tmp_path / "out" / journal.NAME).exists()
    for embed, change in (
        (EmbedConfig(PoolingMode.mean), r'embed.pooling \("last" -> "mean"\)'),
        (EmbedConfig(normalize=True), r"embed.normalize \(false -> true\)"),
        (EmbedConfig(instruction="query: "), r'embed.instruction \("" -> "query: "\)'),
    ):
        with pytest.raises(UserError, match=f"cannot be resumed, because these values changed: {change}"):
            run_embed(replace(run, embed=embed), tmp_path / "out", dump)
    with pytest.raises(UserError, match="cannot be resumed, because these values changed: .*embed.pooling"):
        run_predict(replace(run, task=Task.predict), tmp_path / "out", dump)
