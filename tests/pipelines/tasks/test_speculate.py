"""Drafts from the command line: the same files with and without them, rows with their own settings, refusals and
reports."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose_run_config, dump
from conf.decoding import DecodeConfig, warn_once
from conf.errors import ErrorCode, UserError
from conf.quantization import Activations, QuantConfig, QuantScheme
from conf.schema import Task
from conf.speculation import Acceptance, DraftOrder, Speculate, SpeculationConfig, speculation_of
from conf.tasks import BenchConfig, PredictConfig
from pipelines import pipeline
from pipelines.loading.load_engine import load_engine
from pipelines.tasks.bench import decode_config, measure, prompt_batches, run_bench
from pipelines.tasks.evaluate_data import read_questions
from pipelines.tasks.predict import run_predict
from tests.helpers.builders import REPOSITORY, run_config
from tests.helpers.cases import each
from tests.helpers.speculative_jobs import NGRAM, ROWS, job, metrics, rows_file

TINY = REPOSITORY / "models" / "tiny"


def predictions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


@each("order", DraftOrder)
def test_predictions_are_equal_byte_for_byte(tmp_path: Path, order: DraftOrder) -> None:
    data = rows_file(tmp_path, ROWS)
    settings = NGRAM | {"speculation": SpeculationConfig(adaptive=False, min_ngram=1, order=order)}
    for name, speculation in (("plain", {}), ("drafted", settings)):
        run_predict(job(TINY, data, **speculation), tmp_path / name, dump)
    for file in ("predictions.jsonl", "text_generation_result.txt"):
        assert (tmp_path / "drafted" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert predictions(tmp_path / "plain")[6]["error"] == "prediction is of type int, not str"
    none, some = metrics(tmp_path / "plain"), metrics(tmp_path / "drafted")
    names = ("num_drafted_tokens", "num_accepted_tokens", "acceptance")
    assert [none[name] for name in names] == [0, 0, None]
    assert 0 < some["num_accepted_tokens"] < some["num_drafted_tokens"]
    assert some["acceptance"] == some["num_accepted_tokens"] / some["num_drafted_tokens"]


def test_a_row_has_settings_and_a_prediction_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_predict(job(TINY, "Once upon a time"), tmp_path / "plain", dump)
    (plain,) = predictions(tmp_path / "plain")
    row_settings = {"speculate": "ngram", "speculation": {"num_tokens": 3, "adaptive": False}}
    rows: list[dict[str, Any]] = [
        {"prompt": "Once upon a time", "prediction": plain["text"], "decode": row_settings},
        {"prompt": "Once upon a time"},
        {"prompt": "Once upon a time", "decode": {"speculation": {"acceptance": "top_p_window"}}},
        {"prompt": "Once upon a time", "decode": {"speculation": {"num_token": 3}}},
        {"prompt": "Once upon a time", "decode": {"speculation": {"num_tokens": 99}}},
        {"prompt": "Once upon a time", "decode": {"speculation": 3}},
        {"prompt": "Once upon a time", "decode": {"speculate": "ngrams"}},
    ]
    capsys.readouterr()
    run_predict(job(TINY, rows_file(tmp_path, rows)), tmp_path / "out", dump)
    first, second, *refused = predictions(tmp_path / "out")
    assert first["token_ids"] == second["token_ids"] == plain["token_ids"]
    assert [row["error"] for row in refused] == [
        "decode.speculation.acceptance is not for a row: give it to the run",
        "decode.speculation.num_token does not exist: there are num_tokens, min_ngram, max_ngram, order, shared, adaptive, "
        "acceptance, verify_window, max_candidates, model_path: did you mean num_tokens?",
        "decode.speculation.num_tokens=99 is not allowed: give a number from 1 to 15",
        "decode.speculation=3 is not allowed: give {NAME: VALUE, ...}",
        "decode.speculate='ngrams' does not exist: there are none, ngram, model, mtp",
    ]
    actual = metrics(tmp_path / "out")
    assert actual["num_accepted_tokens"] > 0.5 * actual["num_drafted_tokens"] > 0
    counts = actual["num_accepted_tokens"], actual["num_drafted_tokens"]
    assert re.search(f"^drafts +{counts[0]} of {counts[1]} tokens accepted$", capsys.readouterr().out, re.MULTILINE)


def test_a_job_that_began_without_drafts_continues_with_them(chatty: Path, tmp_path: Path) -> None:
    data, folder = rows_file(tmp_path, [*ROWS[:3], {"prompt": 1}, *ROWS[3:6]]), tmp_path / "out"
    run_predict(job(chatty, data), tmp_path / "plain", dump)
    begun = job(chatty, data)
    with pytest.raises(UserError, match="more than predict.max_errors=0 rows failed"):
        run_predict(replace(begun, predict=replace(begun.predict, max_errors=0)), folder, dump)
    on = replace(begun.predict, resume=str(folder))
    lossy = SpeculationConfig(acceptance=Acceptance.top_p_window)
    run = job(chatty, data, speculate=Speculate.ngram, speculation=lossy)
    with pytest.raises(UserError, match=r"decode\.speculat"):
        run_predict(replace(run, predict=on), tmp_path / "unused", dump)
    run_predict(replace(job(chatty, data, **NGRAM), predict=on), tmp_path / "unused", dump)
    assert (folder / "predictions.jsonl").read_bytes() == (tmp_path / "plain" / "predictions.jsonl").read_bytes()
    assert metrics(folder)["num_resumed_rows"] > 0


@each(
    ("decode", "data", "line"),
    [
        (
            {"speculation": SpeculationConfig(num_tokens=3)},
            "Once",
            "decode.speculation.num_tokens=3 is not used with decode.speculate=none",
        ),
        (
            {"speculate": Speculate.ngram, "speculation": SpeculationConfig(verify_window=1)},
            "Once",
            "decode.speculation.verify_window=1 is not used with decode.speculation.acceptance=exact",
        ),
        (
            {
                "speculate": Speculate.ngram,
                "speculation": SpeculationConfig(order=DraftOrder.paddle, shared=False),
            },
            "Once",
            "decode.speculation.shared=False is not used with decode.speculation.order=paddle",
        ),
        (
            {},
            [{"prompt": "Once", "prediction": "upon"}] * 2,
            "a row's prediction is not used with decode.speculate=none decode.speculation.order=longest: "
            "give decode.speculate=ngram and order=longest",
        ),
        (
            {"speculate": Speculate.ngram, "num_beams": 2},
            "Once",
            "decode.speculate=ngram is not used with decode.num_beams=2, whose candidates compete",
        ),
    ],
)
def test_unused_settings_are_reported_once(
    chatty: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, decode: dict[str, Any], data: Any, line: str
) -> None:
    warn_once.cache_clear()
    prompts = data if isinstance(data, str) else rows_file(tmp_path, data)
    run_predict(job(chatty, prompts, **decode), tmp_path / "out", dump)
    assert [record.getMessage() for record in caplog.records].count(line) == 1


def test_who_cannot_draft_is_refused_in_one_line(chatty: Path, tmp_path: Path) -> None:
    missing = {
        "model": "needs the model that drafts: give decode.speculation.model_path=FOLDER$",
        "mtp": "needs a layer that predicts further tokens, as DeepSeek-V3 has one, and .* has none: give ",
    }
    for name, message in missing.items():
        with pytest.raises(UserError, match=f"^decode.speculate={name} {message}"):
            run_predict(job(chatty, "Once", speculate=Speculate[name]), tmp_path / "out", dump)
    quant = QuantConfig(QuantScheme.int8, activations=Activations.auto)
    line = (
        "decode.speculate=ngram contradicts quant.activations=auto, with which bits depend on how many tokens are "
        "computed at once: leave one of them out"
    )
    with pytest.raises(UserError) as raised:  # before anything is loaded
        replace(job(chatty, "Once", speculate=Speculate.ngram), quant=quant)
    assert (raised.value.code, raised.value.key) == (ErrorCode.excludes, "decode.speculate")
    rows = [{"prompt": "Once", "decode": {"speculate": "ngram"}}, {"prompt": "Once"}]
    run_predict(replace(job(chatty, rows_file(tmp_path, rows)), quant=quant), tmp_path / "out", dump)
    assert [row["error"] for row in predictions(tmp_path / "out")] == [line, None]


def test_a_prediction_needs_a_tokenizer(chatty: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path, [{"prompt_token_ids": [0, 70], "prediction": "x"}, {"prompt_token_ids": [0, 70]}])
    run = job(chatty, data)
    run_predict(replace(run, model=replace(run.model, tokenizer=None)), tmp_path / "out", dump)
    with_it, without = predictions(tmp_path / "out")
    assert with_it["error"] == "there is no tokenizer for the prediction: leave it out, or give model.tokenizer=PATH"
    assert without["error"] is None


def test_python_takes_the_same_settings() -> None:
    plain = pipeline("text_generation", model=TINY, device="cpu", max_new_tokens=20, ignore_eos=True)
    expected = plain("Once upon a time")
    settings = {"num_tokens": 3, "adaptive": False}
    assert plain("Once upon a time", speculate="ngram", speculation=settings) == expected
    drafting = pipeline(
        "text_generation", model=TINY, device="cpu", max_new_tokens=20, ignore_eos=True, speculate="ngram",
        speculation=settings,
    )  # fmt: skip
    text = expected[0]["text_generation_text"][0].removeprefix("Once upon a time")
    assert drafting({"prompt": "Once upon a time", "prediction": text}) == expected
    assert drafting.engine.speculator.counts.num_accepted_tokens > 0
    assert "speculate=ngram, speculation={'num_tokens': 3, 'adaptive': False})" in repr(drafting)
    with pytest.raises(UserError, match="decode.speculate='ngramm' does not exist: there are none, ngram"):
        plain("Once", speculate="ngramm")


def test_a_bench_counts_tokens_and_not_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = BenchConfig(prompt_tokens=5, new_tokens=60, repeats=2, warmup=1)
    run = replace(run_config(TINY), predict=PredictConfig(), task=Task.bench, bench=bench)
    run = replace(run, decode=DecodeConfig(**NGRAM))  # type: ignore[arg-type]
    run_bench(run, tmp_path, dump)
    actual = metrics(tmp_path)
    assert 0 < actual["num_accepted_tokens"] < actual["num_drafted_tokens"] < 2 * 60 * 7
    assert re.search(f"^drafts +{actual['num_accepted_tokens']} of ", capsys.readouterr().out, re.MULTILINE)
    engine = load_engine(run, 1)
    result = measure(engine, next(prompt_batches(bench, engine)), decode_config(run.decode, run.bench.new_tokens))
    assert len(result.token_s) == len(result.step_s) < 59
    tokens = [step / token for step, token in zip(result.step_s, result.token_s, strict=True)]
    assert sum(tokens) == pytest.approx(59)


def test_predictions_in_rows_of_other_tasks_are_refused(tmp_path: Path) -> None:
    data = rows_file(tmp_path, [{"prompt": "a", "answer": "b", "prediction": "b"}])
    with pytest.raises(UserError, match="has a prediction, which task=evaluate does not use: leave it out"):
        read_questions(data)


@pytest.mark.long
def test_settings_are_checked_where_they_are_given() -> None:
    run = compose_run_config(["decode.speculate=ngram", "decode.speculation.order=paddle"])
    assert run.decode.speculation.order is DraftOrder.paddle
    with pytest.raises(UserError, match="Key 'num_token' not in 'SpeculationConfig': .* did you mean num_tokens?"):
        compose_run_config(["decode.speculation.num_token=3"])
    with pytest.raises(UserError, match="'nram', expected one of .none, ngram, model, mtp.: did you mean ngram?"):
        compose_run_config(["decode.speculate=nram"])
    with pytest.raises(UserError, match="max_ngram=1 is not allowed: give a number from .*min_ngram=2 to 16"):
        compose_run_config(["decode.speculation.max_ngram=1"])
    with pytest.raises(UserError, match="decode.speculation.shared=1 is not of type bool"):
        speculation_of(SpeculationConfig(), {"shared": 1})
    with pytest.raises(UserError, match="decode.speculation.num_tokens=3 is not used by task=convert: leave it out"):
        DecodeConfig(speculation=SpeculationConfig(num_tokens=3)).check_unset("by task=convert", "leave it out")
    with pytest.raises(UserError, match="decode.speculate=ngram is not used by task=convert: leave it out"):
        DecodeConfig(speculate=Speculate.ngram).check_unset("by task=convert", "leave it out")
