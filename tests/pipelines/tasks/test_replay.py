"""`--replay FOLDER`: the results of each task again, the first difference, and what differs from run.lock."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.compose import dump, for_hydra, replayed
from conf.decoding import DecodeConfig
from conf.errors import Difference, UserError
from conf.pooling import EmbedConfig, PoolingMode
from conf.quantization import CalibrateConfig, QuantConfig, QuantizeConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig, Task
from conf.serving import ChatConfig
from conf.tasks import (
    BenchConfig,
    ConvertConfig,
    EvaluateConfig,
    ExportConfig,
    PredictConfig,
    PrefixConfig,
    VerifyConfig,
)
from pipelines.jobs.compared import Paths, differences, metrics_difference, rows_difference
from pipelines.tasks.launch import launch
from pipelines.tasks.replay import REFUSED, run_replay
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each
from tests.helpers.embedding_models import write_reward_model
from tests.helpers.sweep_folders import check_names


@pytest.fixture(autouse=True)
def outputs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path_factory.mktemp("outputs")))


def of(model: Path, task: Task, **sections: Any) -> RunConfig:
    options = ModelConfig(str(model), dtype=DType.float32)
    return RunConfig(task, options, device=DeviceConfig(DeviceType.cpu), **sections)


def write_rows(folder: Path) -> str:
    rows = [{"prompt": "Once upon"}, {"prompt": "a time", "decode": {"n": 2, "temperature": 1.5}}, {"prompt": ""}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def replay(folder: Path, *arguments: str) -> None:
    run = replayed(["--replay", str(folder), *arguments])
    assert run is not None
    run_replay(*run, dump)


def change_json(file: Path, change: Callable[[Any], object]) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def runs_of(model: Path, folder: Path) -> dict[str, RunConfig]:
    """Return a run of each task. Those that make a model write it into `folder`."""
    data, texts = write_rows(folder), folder / "texts.txt"
    texts.write_text("Once upon a time there was a girl. " * 9)
    predict = PredictConfig(data=data, output_file=str(folder / "copy.jsonl"))
    int8 = QuantConfig(QuantScheme.int8)
    calibrate = CalibrateConfig(data=str(texts), num_samples=2, sequence_length=8)
    decode = DecodeConfig(max_new_tokens=6, temperature=1.0, logprobs=1)
    return {
        "predict": of(model, Task.predict, predict=predict, decode=decode),
        "embed": of(model, Task.embed, predict=PredictConfig(data=data), embed=EmbedConfig(pooling=PoolingMode.mean)),
        "score": of(folder / "reward", Task.score, predict=PredictConfig(data=data)),
        "evaluate": of(
            model, Task.evaluate, evaluate=EvaluateConfig(data=str(texts), window=32, reference=str(model), seed=5)
        ),
        "convert": RunConfig(
            Task.convert, ModelConfig(str(model)), convert=ConvertConfig(output=str(folder / "converted"))
        ),
        "quantize": of(model, Task.quantize, quant=int8, calibrate=calibrate, quantize=QuantizeConfig()),
        "export": of(model, Task.export, export=ExportConfig(output=str(folder / "exported"))),
        "prefix": of(
            model, Task.prefix, prefix=PrefixConfig(data="Once upon a time " * 3, output=str(folder / "made.prefix"))
        ),
        "verify": RunConfig(Task.verify, TINY, verify=VerifyConfig(str(folder / "job"))),
    }


TASKS = ["predict", "embed", "score", "evaluate", "convert", "quantize", "prefix", "verify"]
TINY = ModelConfig(str(REPOSITORY / "models/tiny"))  # the default, which task=verify does not read


@each("task", [*TASKS, "export"], quick=TASKS)
def test_a_replay_is_equal(task: str, chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if task == "score":
        write_reward_model(tmp_path / "reward")
    folder, runs = tmp_path / "runs" / "first", runs_of(chatty, tmp_path)
    if task == "verify":
        launch(runs["predict"], tmp_path / "job", dump)
    launch(runs[task], folder, dump)
    if task == "verify":  # of a certificate, the changes since the job are not compared
        certificate = json.loads((folder / "certificate.json").read_text())
        (folder / "certificate.json").write_text(json.dumps(certificate | {"changes": ["package torch"]}))
    inputs = json.loads((folder / "run.lock").read_text())["files"]
    assert "model.path/model.safetensors" in inputs or task == "score"
    assert ("verify.folder/predictions.jsonl" in inputs) == (task == "verify")
    if task != "verify":
        check_names(json.loads((folder / "metrics.json").read_text()))
    capsys.readouterr()
    replay(folder)
    assert capsys.readouterr().out.splitlines()[-1] == "equal"
    (again,) = (path for path in folder.parent.iterdir() if path != folder)
    assert (again / "run.lock").is_file()


def test_the_first_difference_of_predictions(chatty: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    launch(runs_of(chatty, tmp_path)["predict"], folder, dump)
    file = folder / "predictions.jsonl"
    content = file.read_text()
    rows = [json.loads(line) for line in content.splitlines()]
    token, logprob = rows[0]["token_ids"][2], rows[0]["logprobs"][2]
    first = logprob[str(token)]

    def other_token(lines: list[Any]) -> None:
        lines[0]["token_ids"][2], lines[0]["text"] = 999, "other"
        lines[0]["logprobs"][2] = {"999": {"logprob": -0.5, "rank": 1}}

    def other_sample(lines: list[Any]) -> None:
        lines[1]["completions"][1]["token_ids"][0] = 999

    changes: list[tuple[Callable[[Any], object], str]] = [
        (other_token, rf"row 0 of predictions.jsonl: token 2 is 999 \(log probability -0.5\) before and {token} "
         rf"\(log probability {first['logprob']}\) now"),
        (other_sample, r"row 1 of predictions.jsonl: completion 1: token 0 is 999 before and \d+ \(log probability .*\) now"),
        (lambda lines: lines[0]["logprobs"][2][str(token)].update(logprob=-9.0),
         rf"row 0 of predictions.jsonl: token 2 \({token}\): {token}.logprob is -9.0 before and {first['logprob']} now"),
        (lambda lines: lines[2].update(id="x"), "row 2 of predictions.jsonl: id is 'x' before and None now"),
        (lambda lines: lines.pop(), "row 2 of predictions.jsonl: index is 'absent' before and 2 now"),
    ]  # fmt: skip
    for change, message in changes:
        file.write_text(content)
        change_json(file, change)
        with pytest.raises(Difference, match=f"^different: {message}$") as raised:
            replay(folder)
        assert raised.value.exit_code == 3


def test_the_first_difference_of_files_vectors_and_metrics(chatty: Path, tmp_path: Path) -> None:
    runs = runs_of(chatty, tmp_path)
    for name in ("embed", "prefix", "evaluate"):
        launch(runs[name], tmp_path / name / "first", dump)
    vectors = np.load(tmp_path / "embed" / "first" / "embeddings.npy")
    vectors[0, 3] += 1
    np.save(tmp_path / "embed" / "first" / "embeddings.npy", vectors)
    with open(tmp_path / "made.prefix", "ab") as file:
        file.write(b"x")
    metrics = tmp_path / "evaluate" / "first" / "metrics.json"
    metrics.write_text(json.dumps(json.loads(metrics.read_text()) | {"perplexity": 1.5, "load_s": 1e9}))
    for name, message in (
        ("embed", rf"row 0 of embeddings.npy: number 3 is {vectors[0, 3]} before and .* now"),
        ("prefix", "file : sha256 .{64} before and .{64} now"),
        ("evaluate", r"perplexity is 1.5 before and \d.* now"),
    ):
        with pytest.raises(Difference, match=f"different: {message}"):
            replay(tmp_path / name / "first")


def test_what_differs_from_the_lock_is_named(chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = tmp_path / "model", tmp_path / "runs" / "first"
    shutil.copytree(chatty, model)
    launch(runs_of(model, tmp_path)["predict"], folder, dump)
    (model / "generation_config.json").write_text("{}")
    settings = model / "tokenizer_config.json"
    settings.write_text(settings.read_text() + "\n")
    lock = json.loads((folder / "run.lock").read_text())
    digest = lock["files"]["model.path/tokenizer_config.json"]["sha256"]
    lock |= {"processor": "a 386", "packages": lock["packages"] | {"torch": "0.1"}}
    (folder / "run.lock").write_text(json.dumps(lock))
    with pytest.raises(Difference, match="differs from this machine: .* give --allow=file,package,processor$"):
        replay(folder, "--allow=package")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[:2] for line in lines] == [
        ["file", "model.path/generation_config.json"],
        ["file", "model.path/tokenizer_config.json"],
        ["package", "torch:"],
        ["processor", "processor:"],
    ]
    assert "missing before" in lines[0]
    assert f"sha256 {digest[:12]} before" in lines[1]
    assert [path.name for path in folder.parent.iterdir()] == ["first"]
    replay(folder, "--allow", "package,processor,file")
    assert capsys.readouterr().out.endswith("\nequal\n")


def test_folders_and_arguments_that_cannot_be_replayed(chatty: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    for run, message in (
        (of(chatty, Task.serve), "task=serve, which answers requests"),
        (of(chatty, Task.chat, chat=ChatConfig()), "task=chat, which answers a person"),
        (
            of(chatty, Task.bench, bench=BenchConfig()),
            "task=bench, which measures times, .*: run its config again with",
        ),
        (of(chatty, Task.predict, predict=PredictConfig(data="-")), "read standard input, which is not saved: run it"),
        (of(chatty, Task.predict, predict=PredictConfig(data="x")), "has no run.lock: give the folder of a finished"),
    ):
        config.write_text(dump(run, tmp_path))
        with pytest.raises(UserError, match=message):
            replay(tmp_path)
    for content in ("", "[]", "{}", '{"files": []', '{"files": {}, "packages": {}, "seeds": 1}'):
        (tmp_path / "run.lock").write_text(content)
        with pytest.raises(UserError, match="run.lock is damaged .*: run it again with --config-path FOLDER"):
            replay(tmp_path)
    (tmp_path / "run.lock").write_text('{"files": {}, "packages": {}, "seeds": {}}')
    with pytest.raises(UserError, match="there is no .*predictions.jsonl: give the folder of a finished run"):
        replay(tmp_path)
    for content, message in (
        ("a: [", "cannot be read"),
        ("[1]", "is not the config that"),
        ("task: predict", "is not the"),
    ):
        config.write_text(content)
        with pytest.raises(UserError, match=message):
            replay(tmp_path)
    config.unlink()
    for arguments, message in (
        (["--replay", str(tmp_path)], "has no config.yaml: give the folder of a run"),
        (["--replay"], "need the folder of a run: give --replay FOLDER"),
        (["--replay", "--allow=file"], "need the folder of a run"),
        (["--allow=file"], "need the folder of a run"),
        (["--replay=x", "--allow=files"], "--allow=files does not exist: there are .*: did you mean file"),
        (
            ["--replay=x", "decode.seed=1"],
            "decode.seed=1 is not used by --replay, which changes no setting: leave it out",
        ),
    ):
        with pytest.raises(UserError, match=message):
            replayed(arguments)
    assert replayed(["decode.seed=1"]) is None
    assert {task.name for task in Task} == {*TASKS, "export", *(task.name for task in REFUSED)}
    assert "--replay FOLDER" in for_hydra(["--help"])[0] + for_hydra(["--help"])[-1]


def test_differences_of_values_and_of_samples(tmp_path: Path) -> None:
    cases: list[tuple[Any, Any, list[Any]]] = [
        ({"a": 1}, {"a": 1}, []),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": 1}, {"a": 1.0}, [(("a",), 1, 1.0)]),
        ({"a": [1, 2]}, {"a": [1]}, [(("a", 1), 2, "absent")]),
        (
            {"text": "x", "token_ids": [1]},
            {"text": "y", "token_ids": [2]},
            [(("token_ids", 0), 1, 2), (("text",), "x", "y")],
        ),
    ]
    for before, now, expected in cases:
        assert list(differences(before, now)) == expected
    paths = Paths(tmp_path / "a" / "metrics.json", tmp_path / "b" / "metrics.json")
    for path, accuracy, score in zip(paths, (0.5, 1.0), (0, 1), strict=True):
        path.parent.mkdir()
        path.write_text(json.dumps({"accuracy": accuracy, "load_s": score}))
        samples = [{"kind": "question", "id": "0", "score": 1}, {"kind": "question", "id": "1", "score": score}]
        (path.parent / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert metrics_difference(paths) == (
        "accuracy is 0.5 before and 1.0 now; row 1 of samples.jsonl: score is 0 before and 1 now"
    )
    paths.now.write_text(paths.before.read_text())
    assert metrics_difference(paths) == "row 1 of samples.jsonl: score is 0 before and 1 now"
    (paths.now.parent / "samples.jsonl").write_text((paths.before.parent / "samples.jsonl").read_text())
    uncertainty = {
        "evaluate_s": 1.0,
        "accuracy_stderr": 0.5,
        "accuracy_ci95": [0.1, 0.9],
        "tasks": {"a": {"b_ci95": None}},
    }
    paths.before.write_text(json.dumps(uncertainty))
    for change, message in (
        ({"evaluate_s": 2.0}, None),
        ({"accuracy_stderr": 0.25}, "accuracy_stderr is 0.5 before and 0.25 now"),
        ({"accuracy_ci95": [0.1, 0.8]}, "accuracy_ci95.1 is 0.9 before and 0.8 now"),
        ({"tasks": {"a": {"b_ci95": [0, 1]}}}, "tasks.a.b_ci95 is None before and [0, 1] now"),
    ):
        paths.now.write_text(json.dumps(uncertainty | change))
        assert metrics_difference(paths) == message
    for broken in ("[1]\n", "{\n"):
        paths.now.write_text(broken)
        with pytest.raises(UserError, match="is not a JSON object"):
            rows_difference(paths)
