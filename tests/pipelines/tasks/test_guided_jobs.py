"""Guides in a predict job and in Python: of the run, of a row, refused for a row, and after resuming."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig
from conf.tasks import PredictConfig
from pipelines import pipeline
from pipelines.jobs import journal
from pipelines.tasks.predict import run_predict
from tests.helpers.builders import run_config

REGEX, CHOICE = {"regex": "[ab]{2,5}x"}, {"choice": ["yes", "no"]}
ROWS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time"},
    {"prompt": "x", "decode": {"guide": CHOICE}},
    {"prompt": "a", "decode": {"guide": {"json_schema": {"not": {}}}}},
    {"prompt": "y", "decode": {"guide": None}},
    {"prompt": "The dog"},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def job(chatty: Path, data: Path, predict: dict[str, Any] | None = None, **decode: Any) -> RunConfig:
    run = run_config(chatty)
    return replace(
        run,
        model=replace(run.model, tokenizer=""),
        decode=DecodeConfig(**{"max_new_tokens": 12, "temperature": 1.0, "seed": 2, "guide": REGEX, **decode}),
        predict=PredictConfig(data=str(data), batch_size=3, **(predict or {})),
    )


def test_rows_have_the_runs_guide_or_their_own(chatty: Path, data: Path, tmp_path: Path) -> None:
    run_predict(job(chatty, data), tmp_path / "out", dump)
    rows = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in rows]
    for index in (0, 4):
        assert re.fullmatch(REGEX["regex"], texts[index])
    assert texts[1] in CHOICE["choice"]
    assert 'has keywords that are not supported: "not"' in rows[2]["error"]
    assert not re.fullmatch(REGEX["regex"], texts[3])
    assert "regex: '[ab]{2,5}x'" in (tmp_path / "out" / "config.yaml").read_text()


def test_a_resumed_job_leaves_the_same(chatty: Path, data: Path, tmp_path: Path) -> None:
    run_predict(job(chatty, data), tmp_path / "whole", dump)
    with pytest.raises(UserError, match="more than predict.max_errors=0 rows failed"):
        run_predict(job(chatty, data, {"max_errors": 0}), tmp_path / "ended", dump)
    assert (tmp_path / "ended" / journal.NAME).exists()
    with pytest.raises(UserError, match="guide"):  # another guide would give other rows
        run_predict(job(chatty, data, {"resume": str(tmp_path / "ended")}, guide=CHOICE), tmp_path / "unused", dump)
    run_predict(job(chatty, data, {"resume": str(tmp_path / "ended")}), tmp_path / "unused", dump)
    for name in ("predictions.jsonl", "text_generation_result.txt"):
        assert (tmp_path / "ended" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_runs_guide_is_refused_before_any_row(chatty: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^decode\.guide\.regex cannot be used: .*unclosed group"):
        run_predict(job(chatty, data, guide={"regex": "("}), tmp_path / "out", dump)
    assert not (tmp_path / "out" / "predictions.jsonl").exists()


def test_in_python(chatty: Path) -> None:
    pipe = pipeline("text_generation", model=str(chatty), device="cpu")
    (result,) = pipe("Once", guide=CHOICE, return_full_text=False)
    assert result["text_generation_text"][0] in CHOICE["choice"]
    (samples,) = pipe("Once", guide=REGEX, n=3, temperature=1.0, seed=1, return_full_text=False)
    assert all(re.fullmatch(REGEX["regex"], text) for text in samples["text_generation_text"])
    with pytest.raises(UserError, match=r"decode\.guide=\{'schema': \{\}\} is not allowed: give one of"):
        pipe("Once", guide={"schema": {}})
