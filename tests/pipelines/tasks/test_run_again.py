"""Every experiment is reproducible from its folder: each task runs again from its config.yaml, in another folder, with
the same results."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import TEXTS

pytestmark = pytest.mark.long

ROWS: list[dict[str, Any]] = [
    {"prompt": "Once upon"},
    {"prompt": "a time", "decode": {"n": 2, "temperature": 1.5, "logprobs": 2}},
    {"prompt": "a time", "decode": {"temperature": 0, "top_p": None, "num_beams": 2, "num_return_sequences": 2}},
    {"prompt": "a time", "decode": {"seed": 3}},
    {"prompt": "a time", "decode": {"seed": None, "top_k": 5}},
    {"prompt": "a time", "decode": {"temperature": 0, "top_p": None, "penalty_alpha": 0.5, "top_k": 4}},
    {"prompt": "a time", "decode": {"temperature": 0}},
]
SAMPLED = {0: None, 1: None, 3: 3, 4: None}  # index: its own seed
# One process for all runs, because imports take most of the time of each. Each job: its overrides, and the overrides of
# the second run.
DRIVER = """
import json, os, runpy, sys

jobs, base, repository = json.loads(sys.argv[1])
sys.path[0] = repository
for name, (first, again) in jobs.items():
    for folder, arguments in (("first", first), ("again", ["--config-path", f"{base}/{name}/first", *again])):
        os.chdir(base if folder == "first" else "/")
        sys.argv[1:] = [*arguments, f"hydra.run.dir={base}/{name}/{folder}"]
        runpy.run_path(f"{repository}/run.py", run_name="__main__")
"""
JOBS: dict[str, tuple[list[str], list[str]]] = {
    "predict": (["decode=sampling", "decode.max_new_tokens=8", "predict.data=rows.jsonl"], []),
    "greedy": (["decode.max_new_tokens=8", "predict.data=sampling_row.jsonl"], []),
    "bench": (["task=bench", "decode=sampling", "bench.data=texts.jsonl", "bench.new_tokens=4", "bench.repeats=1", "bench.warmup=0"], []),
    "evaluate": (
        ["task=evaluate", "evaluate.data=texts.txt", "evaluate.questions=questions.jsonl", "evaluate.reference=model",
         "evaluate.window=32", "decode.max_new_tokens=4"],
        [],
    ),
    "quantize": (
        ["task=quantize", "quant=a8w8", "quant.activations=static", "calibrate.data=texts.txt", "calibrate.num_samples=4",
         "calibrate.sequence_length=8", "quantize.output=a8w8"],
        ["quantize.output=a8w8-again"],
    ),
    "convert": (["task=convert", "convert.output=converted"], ["convert.output=converted-again"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(chatty: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    (base / "model").symlink_to(chatty)
    files: dict[str, list[Any]] = {
        "rows.jsonl": ROWS,
        "sampling_row.jsonl": [{"prompt": "x"}, {"prompt": "x", "decode": {"temperature": 1.0}}],
        "texts.jsonl": [{"prompt": "Once upon a time"}],
        "questions.jsonl": [{"prompt": "What?", "answer": "this"}],
    }
    for name, values in files.items():
        (base / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    (base / "texts.txt").write_text("\n".join([*TEXTS[:1]] * 20))
    common = ["device=cpu", "model.path=model"]
    jobs = {name: ([*common, *first], again_of(base, again)) for name, (first, again) in JOBS.items()}
    command = [sys.executable, "-c", DRIVER, json.dumps([jobs, str(base), str(REPOSITORY)])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return base


def again_of(base: Path, arguments: list[str]) -> list[str]:
    return [argument.replace("output=", f"output={base}/") for argument in arguments]


def metrics(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "metrics.json").read_text()))


def seed_in_config(folder: Path) -> Any:
    return yaml.safe_load((folder / "config.yaml").read_text())["decode"]["seed"]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.mark.long
@each("job", ["predict", "greedy"])
def test_predictions_are_the_same_bytes(runs: Path, job: str) -> None:
    first, again = runs / job / "first", runs / job / "again"
    for name in ("predictions.jsonl", "text_generation_result.txt"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert not any(row["error"] for row in rows(first))
    seed = seed_in_config(first)
    assert isinstance(seed, int)
    assert {seed} == {seed_in_config(again), metrics(first)["seed"], metrics(again)["seed"]}


def test_each_sampled_row_holds_its_seed(runs: Path) -> None:
    seed = seed_in_config(runs / "predict" / "first")
    held = {row["index"]: row["seed"] for row in rows(runs / "predict" / "first") if "seed" in row}
    assert held == {index: row_seed or seed for index, row_seed in SAMPLED.items()}
    (greedy, sampled) = rows(runs / "greedy" / "first")
    assert "seed" not in greedy
    assert sampled["seed"] == seed_in_config(runs / "greedy" / "first")


def test_the_seed_comes_from_the_system(runs: Path) -> None:
    assert len({seed_in_config(runs / job / "first") for job in ("predict", "greedy", "bench")}) == 3


def test_a_bench_measures_the_same_work(runs: Path) -> None:
    first, again = metrics(runs / "bench" / "first"), metrics(runs / "bench" / "again")
    assert first["seed"] == again["seed"] == seed_in_config(runs / "bench" / "first")
    assert [first[name] for name in ("weight_bytes", "kv_bytes")] == [
        again[name] for name in ("weight_bytes", "kv_bytes")
    ]


def test_an_evaluation_measures_the_same(runs: Path) -> None:
    names = (
        "nll_per_token",
        "perplexity",
        "kl_mean",
        "top1_agreement",
        "num_scored_tokens",
        "accuracy",
        "weight_bytes",
    )
    first, again = (metrics(runs / "evaluate" / folder) for folder in ("first", "again"))
    assert [first[name] for name in names] == [again[name] for name in names]
    assert None not in [first[name] for name in names]


@each("folder", ["a8w8", "converted"])
def test_models_are_the_same_bytes(runs: Path, folder: str) -> None:
    first, again = runs / folder, runs / f"{folder}-again"
    files = {file.name for file in first.iterdir()}
    assert files == {file.name for file in again.iterdir()}
    assert any(name.endswith(".safetensors") for name in files)
    # The report of a quantised model names the texts as they were given, and its digest is in the manifest.
    for name in files - ({"report.md", "manifest.json"} if folder == "a8w8" else set()):
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
