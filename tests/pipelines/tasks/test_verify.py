"""`task=verify`: every check of a true job is equal, a changed result is found where it is, other folders are refused."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import Difference, UserError
from conf.schema import ModelConfig, RunConfig, Task
from conf.tasks import PredictConfig, VerifyConfig
from pipelines.jobs.report import REPOSITORY
from pipelines.tasks.embed import run_embed
from pipelines.tasks.launch import launch
from pipelines.tasks.verify import run_verify
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import byte_level, save

ROWS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time"},
    {"prompt": "a time", "decode": {"n": 2, "temperature": 1.5}},
    {"prompt": "a time, a time, a time", "decode": {"num_beams": 2, "num_return_sequences": 2}},
    {"prompt_token_ids": [-1]},
    {"prompt": "She said: hello, world! It was a good day for the dog, it was a good day for the dog."},
    {"prompt": "once", "decode": {"seed": 3, "temperature": 0.9}},
]


def job(folder: Path, data: Path, task: Task) -> RunConfig:
    rows = (
        ROWS if task is Task.predict else [{"prompt": row.get("prompt", 1)} for row in ROWS]
    )  # the fourth is an error
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_config(folder)
    decode = DecodeConfig(max_new_tokens=20, logprobs=1) if task is Task.predict else DecodeConfig()
    model, predict = replace(run.model, tokenizer=""), PredictConfig(data=str(data), batch_size=3)
    return replace(run, task=task, model=model, decode=decode, predict=predict)


def verify(folder: Path, output: Path, **settings: Any) -> dict[str, Any]:
    model = ModelConfig(str(REPOSITORY / "models/tiny"))
    try:
        run_verify(RunConfig(Task.verify, model, verify=VerifyConfig(str(folder), **settings)), output, dump)
    finally:
        certificate = output / "certificate.json"
        written = dict(json.loads(certificate.read_text())) if certificate.exists() else {}
    return written


def checks(certificate: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in certificate["checks"]}


@pytest.fixture
def finished(chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a finished job of task=predict with log probabilities."""
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path / "outputs"))
    folder = tmp_path / "job"
    launch(job(chatty, tmp_path / "rows.jsonl", Task.predict), folder, dump)
    return folder


def test_a_true_job_is_equal_under_every_check(finished: Path, tmp_path: Path) -> None:
    certificate = verify(finished, tmp_path / "out")
    by_name = checks(certificate)
    assert certificate["equal"]
    assert certificate["changes"] == []
    digest = hashlib.sha256((finished / "predictions.jsonl").read_bytes()).hexdigest()
    assert certificate["results"] == {"predictions.jsonl": digest}
    assert all(check["equal"] and check["num_rows"] == len(ROWS) for check in by_name.values())
    names = "again batch_size=1 batch_size=3 threads=1 threads=2 max_batched_tokens=33 max_batched_tokens=256 "
    assert list(by_name) == [*names.split(), "prefix_cache=false", "speculate=ngram", "preemption"]
    # A check proves nothing unless it does what it says.
    assert by_name["preemption"]["num_preemptions"] > 0 == by_name["again"]["num_preemptions"]
    assert by_name["speculate=ngram"]["num_accepted_tokens"] > 0 == by_name["again"]["num_accepted_tokens"]
    sampled = [verify(finished, tmp_path / str(n), rows=2, seed=seed)["rows"] for n, seed in enumerate((0, 0, 5))]
    assert sampled[0] == sampled[1] != sampled[2]
    assert all(len(rows) == 2 for rows in sampled)


def test_a_vector_that_differs_is_found(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", vocab_size=330)
    save(byte_level(), tmp_path / "model")
    run_embed(job(tmp_path / "model", tmp_path / "rows.jsonl", Task.embed), tmp_path / "job", dump)
    assert verify(tmp_path / "job", tmp_path / "equal")["equal"]
    file = tmp_path / "job" / "embeddings.npy"
    vectors = np.load(file)
    vectors[4, 7] = np.nextafter(vectors[4, 7], np.float32(2))  # one bit
    np.save(file, vectors)
    with pytest.raises(Difference, match="different: 9 of 9 checks"):
        verify(tmp_path / "job", tmp_path / "out")
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    difference = certificate["checks"][0]["difference"]
    assert (difference["row"], difference["place"]) == (4, ["vector", 7])
    assert np.nextafter(np.float32(difference["now"]), np.float32(2)) == np.float32(difference["before"])


def change(folder: Path, index: int, edit: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "predictions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    edit(rows[index])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_token_that_differs_is_found_and_other_folders_are_refused(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "changed")
    token = json.loads((finished / "predictions.jsonl").read_text().splitlines()[0])["token_ids"][5]
    change(tmp_path / "changed", 0, lambda row: row["token_ids"].__setitem__(5, 1 if token != 1 else 2))
    lock = json.loads((finished / "run.lock").read_text())
    lock["packages"]["torch"] = "0.1"
    (tmp_path / "changed" / "run.lock").write_text(json.dumps(lock))
    with pytest.raises(Difference) as raised:
        verify(tmp_path / "changed", tmp_path / "out")
    assert raised.value.exit_code == 3
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert [change.split(" before")[0] for change in certificate["changes"]] == ["package torch: 0.1"]
    difference = certificate["checks"][0]["difference"]
    assert (difference["row"], difference["place"], difference["now"]) == (0, ["token_ids", 5], token)
    assert difference["logprob_before"] is None  # the wrong token has none
    assert difference["logprob_now"] < 0
    assert str(raised.value).endswith(f"first, again: {difference['line']}")
    assert difference["line"].startswith("row 0: token 5 is ")
    file = finished / "predictions.jsonl"
    refused: list[tuple[str, Callable[[Path], Any]]] = [
        ("is not a folder", shutil.rmtree),
        ("has no config.yaml", lambda folder: (folder / "config.yaml").unlink()),
        ("cannot be read", lambda folder: (folder / "config.yaml").write_text("a: [")),
        ("not the config that a run has written", lambda folder: (folder / "config.yaml").write_text("")),
        ("has an unfinished job", lambda folder: (folder / "journal.jsonl").touch()),
        ("run.lock is damaged", lambda folder: (folder / "run.lock").write_text("{")),
        ("has no metrics.json", lambda folder: (folder / "metrics.json").unlink()),
        ("line 6 of .* is damaged", lambda folder: (folder / file.name).write_bytes(file.read_bytes()[:-9])),
        ("is empty", lambda folder: (folder / file.name).write_text("")),
        ("its data has 6 rows now, but its results 5", lambda folder: drop_last_line(folder / file.name)),
        ("row 4 has another prompt now", lambda folder: change(folder, 4, lambda row: row.update(prompt="y"))),
        (
            "task=bench, which has no rows",
            lambda folder: (folder / "config.yaml").write_text(dump(RunConfig(Task.bench, ModelConfig("x")), folder)),
        ),
        (
            "rows of standard input",
            lambda folder: replace_in_config(folder, f"data: {tmp_path}/rows.jsonl", "data: '-'"),
        ),
        ("the file does not exist", lambda folder: replace_in_config(folder, "rows.jsonl", "gone.jsonl")),
        ("needs its model /gone", lambda folder: replace_in_config(folder, "  path: /", "  path: /gone/")),
    ]
    for number, (message, damage) in enumerate(refused):
        damaged = tmp_path / f"damaged{number}"
        shutil.copytree(finished, damaged)
        damage(damaged)
        with pytest.raises(UserError, match=message):
            verify(damaged, tmp_path / "none")
        assert not (tmp_path / "none").exists()


def drop_last_line(file: Path) -> None:
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))


def replace_in_config(folder: Path, text: str, other: str) -> None:
    config = (folder / "config.yaml").read_text()
    assert text in config
    (folder / "config.yaml").write_text(config.replace(text, other, 1))


@each("settings", [{"folder": None}, {"folder": "x", "model": "other"}])
def test_settings_that_nothing_reads_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = ModelConfig(settings.pop("model", str(REPOSITORY / "models/tiny")))
    with pytest.raises(UserError, match="is missing|is not used by task=verify"):
        run_verify(RunConfig(Task.verify, model, verify=VerifyConfig(**settings)), tmp_path / "none", dump)
