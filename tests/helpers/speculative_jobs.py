"""Jobs with drafts over a small chat model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.decoding import DecodeConfig
from conf.schema import RunConfig
from conf.speculation import Speculate, SpeculationConfig
from conf.tasks import PredictConfig
from tests.helpers.builders import run_config

NGRAM = {"speculate": Speculate.ngram, "speculation": SpeculationConfig(adaptive=False, min_ngram=1)}
ROWS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time, once upon a time"},
    {"prompt": "a", "decode": {"temperature": 1.2, "top_p": 0.9, "n": 3}},
    {"prompt": "b b b b", "decode": {"repetition_penalty": 1.3, "logprobs": 2}},
    {"prompt": "hello, world!", "prediction": "hello"},
    {"prompt": "hello", "decode": {"num_beams": 3}},
    {"prompt": "今天天气很好", "decode": {"temperature": 0.8, "no_repeat_ngram_size": 3}},
    {"prompt": "bad", "prediction": 5},
]


def job(chatty: Path, data: Path | str, **decode: Any) -> RunConfig:
    run = run_config(chatty)
    return replace(
        run,
        model=replace(run.model, tokenizer=""),
        decode=DecodeConfig(**{"max_new_tokens": 20, "seed": 7, "ignore_eos": True, **decode}),
        predict=PredictConfig(data=str(data), batch_size=3),
    )


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def metrics(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "metrics.json").read_text()))
