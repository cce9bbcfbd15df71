"""Adapters by name: in rows, for a whole job, in Python; and which adapter changes prevent resuming a job."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from conf.compose import compose_run_config, dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import ModelConfig, RunConfig, Task
from conf.tasks import PredictConfig
from pipelines import pipeline
from pipelines.loading.fingerprint import fingerprint
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from pipelines.tasks.predict import run_predict
from tests.helpers.adapters import ALL_LINEAR, write_adapter
from tests.helpers.builders import run_config
from tests.helpers.cases import each
from tests.helpers.soft_prefixes import write_paddle


@pytest.fixture(scope="module")
def adapters(chatty: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(folder / name, chatty, LlamaForCausalLM, seed, r=4, target_modules=ALL_LINEAR))
        for seed, name in enumerate(("fr", "de"))
    }


def job(chatty: Path, adapters: dict[str, str], data: Path | str, **predict: Any) -> RunConfig:
    run = run_config(chatty)
    return replace(
        run,
        model=replace(run.model, tokenizer="", adapters=adapters),
        decode=DecodeConfig(max_new_tokens=6, ignore_eos=True),
        predict=PredictConfig(data=str(data), **predict),
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


def test_rows_name_their_adapters(chatty: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    """An unknown name, or a path, is an error of its row. `predict.adapter` is for rows that name none."""
    data = tmp_path / "rows.jsonl"
    names = ["fr", None, "de", "it", adapters["fr"], "\x1b\n" + 500 * "x", 7]
    data.write_text("".join(json.dumps({"prompt": "Once", "adapter": name}) + "\n" for name in names))
    run_predict(job(chatty, adapters, data), tmp_path / "mixed", dump)
    french, base, german, unknown, path, long, number = rows(tmp_path / "mixed")
    assert len({french["text"], base["text"], german["text"]}) == 3
    assert unknown["error"] == "adapter 'it' does not exist: there are fr, de"
    assert path["error"].startswith(f"adapter '{adapters['fr']}' does not exist: there are fr, de")
    assert long["error"].startswith(f"adapter '\\x1b\\n{'x' * 193}... does not exist: there are fr, de")
    assert number["error"] == "adapter is of type int, not str"
    run_predict(job(chatty, adapters, data, adapter="de"), tmp_path / "all", dump)
    assert [row["text"] for row in rows(tmp_path / "all")[:3]] == [french["text"], german["text"], german["text"]]
    assert json.loads((tmp_path / "all" / "metrics.json").read_text())["unused_fields"] == []
    run_predict(job(chatty, {}, data), tmp_path / "none", dump)
    assert rows(tmp_path / "none")[0]["error"] == (
        "adapter 'fr' does not exist: there are none: give model.adapters={NAME: FOLDER}"
    )


def test_in_python(chatty: Path, adapters: dict[str, str]) -> None:
    overrides = ["model.dtype=float32", "model.max_adapters=1"]
    pipe = pipeline(
        "text_generation", model=chatty, device="cpu", overrides=overrides, max_new_tokens=6, ignore_eos=True
    )
    (base,) = pipe("Once")
    with pytest.raises(UserError, match="prompt 0: adapter 'fr' does not exist: there are none"):
        pipe("Once", adapter="fr")
    for name, folder in adapters.items():
        pipe.engine.load_adapter(name, folder)
    (french,) = pipe("Once", adapter="fr")
    (german,) = pipe({"prompt": "Once", "adapter": "de"}, adapter="fr")
    assert pipe(["Once", {"prompt": "Once", "adapter": "fr"}], adapter="de") == [german, french]
    assert pipe("Once") == [base]
    assert french != base != german != french
    with pytest.raises(UserError, match="adapter=7 is not allowed: give a name of model.adapters"):
        pipe("Once", adapter=7)
    pipe.engine.unload_adapter("fr")
    with pytest.raises(UserError, match="adapter 'fr' does not exist: there are de"):
        pipe("Once", adapter="fr")


def test_from_the_command_line(chatty: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    adapter_option = ",".join(f"{name}:{folder}" for name, folder in adapters.items())
    run = compose_run_config(
        [f"model.adapters={{{adapter_option}}}", "predict.adapter=fr"], {"model.path": str(chatty)}
    )
    assert (run.model.adapters, run.predict.adapter) == (adapters, "fr")
    assert all(folder in dump(run, tmp_path) for folder in adapters.values())


@each(
    ("make_config", "message"),
    [
        (lambda: ModelConfig(path="m", max_adapters=0), r"model\.max_adapters=0 .* a number from 1 to 1024"),
        (lambda: ModelConfig(path="m", max_adapters=10**11), r"model\.max_adapters=100000000000 .* a number from 1 "),
        (
            lambda: ModelConfig(path="m", adapters={"fr": ""}),
            r"model\.adapters={'fr': ''} .* paths by name: {NAME: PATH",
        ),
        (
            lambda: RunConfig(predict=PredictConfig(adapter="fr")),
            r"predict\.adapter=fr is none of model\.adapters: give",
        ),
        (
            lambda: RunConfig(model=ModelConfig("m", adapters={"de": "x"}), predict=PredictConfig(adapter="fr")),
            r"predict\.adapter=fr is none of model\.adapters: there are de",
        ),
        (
            lambda: RunConfig(Task.bench, model=ModelConfig("m", adapters={"de": "x"})),
            r"model\.adapters=.* is not used by task=bench: leave it at .*, or merge",
        ),
    ],
)
def test_settings_that_contradict(make_config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config()


def test_a_job_knows_the_adapters_content(chatty: Path, adapters: dict[str, str]) -> None:
    def of(run: RunConfig) -> dict[str, Any]:
        return fingerprint(run, resolve_model(run.model), load_engine(run, 2))

    one = of(job(chatty, {"fr": adapters["fr"]}, "x"))
    assert one == of(job(chatty, {"fr": adapters["fr"]}, "x", batch_size=7))
    other = of(job(chatty, {"fr": adapters["de"]}, "x"))
    assert {name for name in one if one[name] != other[name]} == {"model.adapters.fr"}
    chosen = of(job(chatty, {"fr": adapters["fr"]}, "x", adapter="fr"))
    assert {name for name in one if one[name] != chosen[name]} == {"predict.adapter"}


def test_a_prefix_was_made_without(chatty: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    write_paddle(tmp_path / "pre_caches.npy", 3)
    run = job(chatty, adapters, "x")
    engine = load_engine(replace(run, model=replace(run.model, prefixes={"story": str(tmp_path)})), 2)
    with pytest.raises(
        UserError, match="adapter fr cannot be used with a prefix, which was made without the adapter: leave one"
    ):
        engine.request(0, [5], DecodeConfig(max_new_tokens=1), prefix="story", adapter="fr")
