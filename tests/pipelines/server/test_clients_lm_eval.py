"""lm-eval's `local-completions` with the served model gives the results of task=evaluate on the same files."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.tiny.corpus import questions
from models.tokenizers import load_tokenizer
from tests.helpers.builders import REPOSITORY
from tests.helpers.clients import Expected
from tests.helpers.command import run
from tests.helpers.server import served

TINY = REPOSITORY / "models" / "tiny"
STRIDE = 64  # tokens that a window scores; the one before them is its context
NEW_TOKENS = 12
STARTS = ("Once upon a time", "One sunny day,", "I love Beijing,", "I love Rome,", "A horse is", "A lion is")
TASKS = {
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "asked": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS},
        "metric_list": [{"metric": "exact_match"}],
        "filter_list": [
            {"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
    },
}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(folder: Path) -> list[str]:
    """Write texts, questions with alternating right and wrong answers, and lm-eval's tasks of both. Returns the
    texts."""
    rounds = [first for _, (first, *_) in zip(range(60), questions(7, held_out=True), strict=False)]
    tokenizer, expected = load_tokenizer(TINY), Expected()
    assert tokenizer is not None
    long = " ".join(f"{turn.prompt} {turn.answer}" for turn in rounds)
    while len(tokenizer.encode(long, False)) % STRIDE:  # lm-eval gives a shorter last window more context
        long = long[:-1]
    texts = [long, *(f"{turn.prompt} {turn.answer}" for turn in rounds[:7])]
    write_rows(folder / "texts.jsonl", [{"text": text} for text in texts])
    asked = []
    for number, start in enumerate(STARTS):
        ids = tokenizer.encode(start, False)
        said = expected.text(ids, max_new_tokens=NEW_TOKENS, temperature=0.0).split("\n")[0].strip()
        answer = said if number % 2 else f"not {said}"
        asked.append({"question": start, "prompt_token_ids": ids, "answer": answer})
    write_rows(folder / "asked.jsonl", asked)
    write_rows(folder / "questions.jsonl", [{k: v for k, v in row.items() if k != "question"} for row in asked])
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
        data = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps(data | task))  # JSON is YAML
    return texts


def lm_eval(folder: Path, url: str) -> dict[str, Any]:
    """Return the results of lm-eval's command, which sends several prompts per request, and several requests at
    once."""
    model = f"model=tiny,base_url={url}/v1/completions,tokenizer={TINY},num_concurrent=2,max_length={STRIDE + 2}"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += ["--include_path", str(folder), "--tasks", ",".join(TASKS), "--batch_size", "3"]
    command += ["--output_path", str(folder / "results")]
    environment = os.environ | {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (folder / "results").rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    return results


@pytest.mark.long
def test_lm_eval_gives_evaluates_numbers(tmp_path: Path) -> None:
    texts = write_data(tmp_path)
    done = run(
        "task=evaluate", "device=cpu", f"evaluate.data={tmp_path / 'texts.jsonl'}", f"hydra.run.dir={tmp_path / 'run'}",
        f"evaluate.questions={tmp_path / 'questions.jsonl'}", f"decode.max_new_tokens={NEW_TOKENS}",
        f"evaluate.window={STRIDE + 1}", f"evaluate.stride={STRIDE}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours = json.loads((tmp_path / "run" / "metrics.json").read_text())
    with served(tmp_path / "served") as (_, url):
        theirs = lm_eval(tmp_path, url)
    num_bytes = sum(len(text.encode()) for text in texts)
    nll = theirs["texts"]["bits_per_byte,none"] * math.log(2) * num_bytes
    assert nll == pytest.approx(
        ours["nll_per_token"] * ours["num_scored_tokens"], rel=1e-5
    )  # sums of float32 logarithms
    assert theirs["asked"]["exact_match,stripped"] == ours["accuracy"] == 0.5
