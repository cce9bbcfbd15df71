"""What ran is pinned: hub ids have commits, and run.lock has the hashes of the inputs."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from conf.compose import dump, replayed
from conf.decoding import DecodeConfig
from conf.errors import Difference, UserError
from conf.schema import ModelConfig, RunConfig, Task
from conf.speculation import Speculate, SpeculationConfig
from conf.tasks import EvaluateConfig, PredictConfig
from pipelines.jobs.hub_commits import hub_commits, with_commits
from pipelines.jobs.input_files import input_files
from pipelines.jobs.run_lock import FileHash, Hashing, hash_file, locked
from pipelines.tasks.launch import launch
from tests.helpers.builders import run_config
from tests.helpers.hub_cache import store_commit, use_cache

A, B, C, D = (digit * 40 for digit in "abcd")


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path / "outputs"))
    use_cache(tmp_path / "cache", monkeypatch)


def predicted(run: RunConfig, folder: Path) -> list[Any]:
    launch(run, folder, dump)
    return [json.loads(line)["token_ids"] for line in (folder / "predictions.jsonl").read_text().splitlines()]


def saved(folder: Path) -> RunConfig:
    read = replayed(["--replay", str(folder)])
    assert read is not None
    return read[0]


def test_a_run_reads_the_same_commit_again(chatty: Path, tmp_path: Path) -> None:
    """Also after the branch has moved."""
    first = store_commit("org/name", A, chatty)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "Once upon a time"}\n')
    run = replace(
        run_config(Path("org/name")),
        decode=DecodeConfig(max_new_tokens=8, temperature=0.0),
        predict=PredictConfig(data=str(data), resume="none"),
    )
    run = replace(run, model=replace(run.model, tokenizer=""))
    tokens = predicted(run, tmp_path / "a")
    second = store_commit("org/name", B, chatty)
    weights = load_file(second / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, second / "model.safetensors", {"format": "pt"})
    assert predicted(run, tmp_path / "b") != tokens
    assert predicted(saved(tmp_path / "a"), tmp_path / "again") == tokens
    for name, commit, model in (("a", A, first), ("b", B, second), ("again", A, first)):
        config = (tmp_path / name / "config.yaml").read_text()
        assert f"path: org/name@{commit}\n" in config
        assert "revision: null" in config
        environment = json.loads((tmp_path / name / "environment.json").read_text())
        assert environment["hub_commits"] == {"model.path": f"org/name@{commit}"}
        weights_file, digest = model / "model.safetensors", hashlib.sha256((model / "model.safetensors").read_bytes())
        lock = json.loads((tmp_path / name / "run.lock").read_text())
        entry = {"path": str(weights_file), "bytes": weights_file.stat().st_size, "sha256": digest.hexdigest()}
        assert lock["files"]["model.path/model.safetensors"] == entry
        assert {"model.path/config.json", "model.path/tokenizer.json", "predict.data"} < lock["files"].keys()
        assert lock["packages"]["torch"]
        assert lock["processor"]
        assert isinstance(lock["seeds"]["decode.seed"], int)
    shutil.rmtree(first)
    missing = (
        rf"^there is no folder org/name@{A}, and as a hub id at revision {A} it cannot be downloaded .*: download .*$"
    )
    with pytest.raises(UserError, match=missing):
        launch(saved(tmp_path / "a"), tmp_path / "gone", dump)
    assert not (tmp_path / "gone").exists()


def test_every_hub_id_has_a_commit(tmp_path: Path) -> None:
    store_commit("org/name", A, refs=("v1",))
    store_commit("org/name", B)
    store_commit("org/tok", C, refs=("main", "v1"))
    store_commit("org/small", D, refs=("v2",))
    speculation = SpeculationConfig(model_path="org/small@v2")
    run = RunConfig(
        task=Task.evaluate,
        model=ModelConfig("org/name@v1", tokenizer="org/tok"),
        decode=DecodeConfig(speculate=Speculate.model, speculation=speculation),
        evaluate=EvaluateConfig(data="text.txt", reference="org/name"),
    )
    pinned = with_commits(run)
    assert (pinned.model.path, pinned.model.revision, pinned.model.tokenizer) == ("org/name", A, f"org/tok@{C}")
    assert hub_commits(pinned) == {
        "model.path": f"org/name@{A}",
        "model.tokenizer": f"org/tok@{C}",
        "decode.speculation.model_path": f"org/small@{D}",
        "evaluate.reference": f"org/name@{B}",
    }
    by_setting = ModelConfig("org/name", tokenizer="org/tok", revision="v1")
    assert with_commits(replace(run, model=by_setting)) == pinned
    assert with_commits(pinned) == pinned
    assert f"reference: org/name@{B}\n" in dump(pinned, tmp_path)
    unused = replace(run, task=Task.predict, decode=DecodeConfig(), evaluate=EvaluateConfig())
    assert hub_commits(with_commits(unused)).keys() == {"model.path", "model.tokenizer"}
    for model, message in (
        (ModelConfig("org/name@v1", revision="main"), "model.revision=main contradicts model.path=org/name@v1: give"),
        (ModelConfig("org/name@v3"), "org/name@v3, and as a hub id at revision v3 it cannot be downloaded"),
        (ModelConfig("org/name", tokenizer="org/tok@v9"), "give model.tokenizer=FOLDER, or check the id"),
    ):
        with pytest.raises(UserError, match=message):
            with_commits(replace(run, model=model))


def test_hashes_are_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, computed = tmp_path / "weights", list[Path]()
    run = Hashing.run

    def counted(hashing: Hashing, is_stopped: Callable[[], bool]) -> FileHash | None:
        computed.extend([hashing.path] * (hashing.result is None))
        return run(hashing, is_stopped)

    monkeypatch.setattr(Hashing, "run", counted)

    def write(content: bytes, age_s: int) -> None:
        file.write_bytes(content)
        moment = file.stat().st_mtime_ns - age_s * 10**9
        os.utime(file, ns=(moment, moment))

    content = bytes(range(256)) * 5000
    for age_s, num_computed in ((100, 1), (90, 1), (0, 2)):  # a file that has just changed may change again
        computed.clear()
        write(content + bytes([age_s]), age_s)
        for _ in range(2):
            assert hash_file(file).sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        assert len(computed) == num_computed
    write(content, 100)
    hash_file(file)
    (entry,) = (tmp_path / "outputs" / "hashes").iterdir()
    for damage in (b"", b"[1]", b'{"a": 1}', entry.read_bytes().replace(b"weights", b"Weights")):
        entry.write_bytes(damage)
        assert hash_file(file).sha256 == hashlib.sha256(content).hexdigest()
    shutil.copy2(file, tmp_path / "copy")  # the same size and time, another inode
    os.replace(tmp_path / "copy", file)
    computed.clear()
    hash_file(file)
    assert computed == [file]
    monkeypatch.setenv("QUINTET_OUTPUTS", "/dev/null")  # cannot be written
    assert hash_file(file).sha256 == hashlib.sha256(content).hexdigest()


def test_a_lock_has_the_files_that_a_run_reads(chatty: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    shutil.copytree(chatty, model)
    adapter.mkdir()
    for file in (model / "old.bin", model / "notes.md", model / ".hidden.json", adapter / "adapter_model.safetensors"):
        file.write_bytes(b"x")
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    run = run_config(model, adapters={"a": str(adapter)})
    run = replace(run, predict=PredictConfig(data="a prompt " * 999, chat_template=str(template)))
    assert input_files(run).keys() == {
        *(
            f"model.path/{name}"
            for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
        ),
        "model.adapters.a/adapter_model.safetensors",
        "predict.chat_template",
    }
    folder = tmp_path / "run"
    folder.mkdir()
    with locked(run, dump) as locked_dump:
        locked_dump(replace(run, decode=DecodeConfig(seed=5)), folder)
    lock = json.loads((folder / "run.lock").read_text())
    assert lock["seeds"]["decode.seed"] == 5
    assert lock["files"]["predict.chat_template"]["bytes"] == template.stat().st_size
    for number, error in enumerate((KeyError(), Difference("a gate"), None)):  # a bug leaves no lock
        made = tmp_path / f"ended{number}"
        made.mkdir()
        with nullcontext() if error is None else pytest.raises(type(error)), locked(run, dump) as locked_dump:
            locked_dump(run, made)
            if error is not None:
                raise error
        assert (made / "run.lock").exists() == (number > 0)
    for error in (UserError("before it has a folder"), None):
        with nullcontext() if error is None else pytest.raises(UserError), locked(run, dump):
            if error is not None:
                raise error
