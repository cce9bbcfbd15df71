"""Soft prefixes in jobs: config, rows, the Python pipeline, and fingerprints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose_run_config, dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import ModelConfig, RunConfig, Task
from conf.tasks import PredictConfig
from pipelines.jobs.prompts import parse_row
from pipelines.loading.fingerprint import fingerprint
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from pipelines.loading.quantize.calibrated import calibration_job
from pipelines.python.text_pipeline import TextGenerationPipeline
from pipelines.tasks.predict import run_predict
from tests.helpers.builders import run_config
from tests.helpers.soft_prefixes import write_paddle


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("prefixes")
    write_paddle(folder / "a.npy", 5)
    write_paddle(folder / "b.npy", 7)
    return {name: str(folder / f"{name}.npy") for name in "ab"}


def job(chatty: Path, prefixes: dict[str, str], data: Path | str, prefix: str | None = None) -> RunConfig:
    run = run_config(chatty, prefixes=prefixes)
    return replace(
        run,
        model=replace(run.model, tokenizer=""),
        decode=DecodeConfig(max_new_tokens=8, ignore_eos=True),
        predict=PredictConfig(data=str(data), batch_size=3, prefix=prefix),
    )


def predict(run: RunConfig, folder: Path) -> list[dict[str, Any]]:
    run_predict(run, folder, dump)
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


def test_rows_name_prefixes_and_the_job_names_one_for_all(
    chatty: Path, prefixes: dict[str, str], tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    row = {"prompt": "Once upon a time"}
    lines = [row, row | {"prefix": "a"}, row | {"prefix": "b"}, row | {"prefix": None}, row | {"prefix": "c"}]
    lines += [row | {"prefix": prefixes["a"]}, row | {"prefix": 3}]
    data.write_text("\n".join(map(json.dumps, lines)))
    none, a, b, null, unknown, path, number = predict(job(chatty, prefixes, data), tmp_path / "none")
    assert len({str(row["token_ids"]) for row in (none, a, b)}) == 3
    assert null["token_ids"] == none["token_ids"]
    assert none["num_prompt_tokens"] == a["num_prompt_tokens"] == b["num_prompt_tokens"]
    assert unknown["error"] == "prefix 'c' does not exist: there are a, b"
    assert "does not exist: there are a, b" in path["error"]
    assert number["error"] == "prefix is of type int, not str"
    rows = predict(job(chatty, prefixes, data, "b"), tmp_path / "all")
    assert [row["token_ids"] for row in rows[:4]] == [row["token_ids"] for row in (b, a, b, b)]


def test_an_unknown_prefix_of_the_job_is_refused_before_anything_is_written(
    chatty: Path, prefixes: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="prefix 'c' does not exist: there are a, b"):
        run_predict(job(chatty, prefixes, "Once", "c"), tmp_path / "out", dump)
    assert not (tmp_path / "out").exists()


def test_python_takes_the_name(chatty: Path, prefixes: dict[str, str]) -> None:
    pipe = TextGenerationPipeline(job(chatty, prefixes, "Once", "b"))
    by_default, a = pipe("Once"), pipe("Once", prefix="a")
    assert by_default == pipe("Once", prefix="b") == pipe({"prompt": "Once", "prefix": "b"}, prefix="a")
    assert a != by_default
    with pytest.raises(UserError, match="prompt 0: prefix 'c' does not exist: there are a, b"):
        pipe("Once", prefix="c")
    with pytest.raises(UserError, match="prompt 0: prefix '' does not exist: there are a, b"):
        pipe({"prompt": "Once", "prefix": ""})
    with pytest.raises(UserError, match="prefix=3 is not allowed: give a name of model.prefixes"):
        pipe("Once", prefix=3)


def test_the_fingerprint_covers_contents(chatty: Path, prefixes: dict[str, str], tmp_path: Path) -> None:
    def of(prefixes: dict[str, str], prefix: str | None = None) -> dict[str, Any]:
        run = job(chatty, prefixes, "Once", prefix)
        return fingerprint(run, resolve_model(run.model), load_engine(run, 2))

    moved = tmp_path / "moved.npy"
    moved.write_bytes(Path(prefixes["a"]).read_bytes())
    assert of({"x": prefixes["a"]}) == of({"x": str(moved)})
    assert of({"x": prefixes["a"]}) != of({"x": prefixes["b"]})
    assert of({"x": prefixes["a"]}) != of({"x": prefixes["a"]}, "x")
    assert "model.prefixes" not in of({})


def test_calibration_begins_with_no_prefix(chatty: Path, prefixes: dict[str, str]) -> None:
    run = job(chatty, prefixes, "Once", "a")
    run = replace(run, device=replace(run.device, kept_prefixes=["kept"]))
    floats = calibration_job(run)
    assert (floats.model.prefixes, floats.device.kept_prefixes) == (None, [])


def test_the_config_composes_and_repeats(
    prefixes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = compose_run_config([f"model.prefixes={{a: {prefixes['a']}}}", "predict.prefix=a"])
    assert (run.model.prefixes, run.predict.prefix) == ({"a": prefixes["a"]}, "a")
    monkeypatch.chdir(Path(prefixes["a"]).parent)
    relative = replace(run, model=replace(run.model, prefixes={"a": "a.npy"}))
    assert prefixes["a"] in dump(relative, tmp_path)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(
        UserError, match="model.prefixes=.* is not used by task=bench: leave it at .*, or give task=predict"
    ):
        RunConfig(task=Task.bench, model=ModelConfig(path="x", prefixes={"a": "b"}))
    for wrong in ({"a": ""}, {"a": None}, {3: "x"}, "", "story.npy", ["story"]):
        with pytest.raises(UserError, match="model.prefixes=.* is not allowed: give paths by name: {NAME: PATH, ...}"):
            ModelConfig(path="x", prefixes=wrong)
    with pytest.raises(UserError, match="predict.prefix='' is not allowed"):
        PredictConfig(prefix="")
    with pytest.raises(UserError, match="predict.prefix=a is not allowed with predict.adapter=b"):
        PredictConfig(prefix="a", adapter="b")
    assert parse_row(0, {"prompt": "x", "prefix": "a"}).prefix == "a"
