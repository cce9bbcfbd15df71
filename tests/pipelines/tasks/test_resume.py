"""A job that ended in any way continues, and writes the files of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig
from conf.tasks import PredictConfig
from pipelines.jobs import journal
from pipelines.tasks.predict import run_predict
from tests.helpers.builders import REPOSITORY, run_config, said
from tests.helpers.cases import each
from tests.helpers.command import run as run_command
from tests.helpers.fork_server import true_starts

SAMPLING = {"temperature": 0.9, "top_p": 0.9, "seed": 3}  # no logprobs, whose last digits depend on the batch
NUM_ROWS = 9
RESULTS = ("predictions.jsonl", "text_generation_result.txt")

# Kills a job at a given call with an uncatchable signal. Every job is a fork of a process that has only imported
# modules.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
from conf.compose import dump
from conf.schema import DecodeConfig, DeviceConfig, DeviceType, ModelConfig, RunConfig
from conf.tasks import PredictConfig
from models.tokenizers import Tokenizer, load_tokenizer
from pipelines.jobs.journal import Journal
from pipelines.tasks.predict import run_predict

model, data, base, decode, moments = json.loads(sys.argv[1])
device = DeviceConfig(DeviceType.cpu, threads=1)
config = RunConfig(model=ModelConfig(path=model), decode=DecodeConfig(**decode), device=device)
load_tokenizer(Path(model))  # for all that this imports


def before(owner, name, moment, half=False):
    real, calls = getattr(owner, name), []

    def hooked(*arguments):
        calls.append(arguments)
        if len(calls) == moment:
            if half:
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(owner, name, hooked)


def run(folder, resume, hook=None):
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        if hook:
            place, moment = hook
            owner = {"append": Journal, "write": os, "replace": os, "remove": Journal}[place]
            before(owner, place, moment, half=place == "write")
        predict = PredictConfig(data=data, batch_size=3, resume=resume)
        run_predict(RunConfig(**{**vars(config), "predict": predict}), Path(folder), dump)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


ends = [run(f"{base}/whole", "auto")]
for i, moment in enumerate(moments):
    folder = f"{base}/{i}"
    ends.append(run(folder, "auto", moment))
    ends.append(run(folder, folder if i % 2 else "auto"))
json.dump(ends, sys.stdout)
"""
# The rename calls are for config.yaml, environment.json, predictions.jsonl, text_generation_result.txt and
# metrics.json, in this order.
MOMENTS = [
    ("write", 1), ("append", 1), ("write", 2), ("append", 5), ("write", 7), ("append", NUM_ROWS), ("replace", 1), ("replace", 3),
    ("replace", 4), ("replace", 5), ("remove", 1),
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "Once upon a time " * (i % 3), "id": i} for i in range(NUM_ROWS)]
    rows[4] = {"promt": "a bad row"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def job(chatty: Path, data: Path | str, predict: dict[str, Any] | None = None, **decode: Any) -> RunConfig:
    run = run_config(chatty)
    return replace(
        run,
        model=replace(run.model, tokenizer=""),
        decode=DecodeConfig(**{"max_new_tokens": 6, **decode}),
        predict=PredictConfig(data=str(data), batch_size=3, **(predict or {})),
    )


def unfinished(chatty: Path, data: Path, folder: Path, **decode: Any) -> None:
    """Return a job that has ended at its one bad row."""
    with pytest.raises(UserError, match="more than predict.max_errors=0 rows failed"):
        run_predict(job(chatty, data, {"max_errors": 0}, **decode), folder, dump)
    assert (folder / journal.NAME).exists()


def results(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in RESULTS]


@each("names_the_seed", [False, True])
def test_a_job_without_a_seed_continues_with_the_one_that_was_drawn(
    chatty: Path, data: Path, tmp_path: Path, names_the_seed: bool
) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.9}
    unfinished(chatty, data, tmp_path / "ended", **sampling)
    seed = json.loads((tmp_path / "ended" / journal.NAME).read_text().splitlines()[0])["seed"]
    again = sampling | ({"seed": seed} if names_the_seed else {})
    run_predict(job(chatty, data, {"resume": str(tmp_path / "ended")}, **again), tmp_path / "unused", dump)
    run_predict(job(chatty, data, seed=seed, **sampling), tmp_path / "whole", dump)
    for name in RESULTS:
        assert (tmp_path / "ended" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert f"\n  seed: {seed}\n" in (tmp_path / "ended" / "config.yaml").read_text()


@pytest.mark.long
@pytest.mark.parametrize("decode", [pytest.param({}, marks=pytest.mark.matrix), SAMPLING], ids=["greedy", "seeded"])
def test_killed_at_any_moment_it_leaves_what_an_uninterrupted_job_leaves(
    chatty: Path, tmp_path: Path, data: Path, decode: dict[str, Any]
) -> None:
    arguments = json.dumps([str(chatty), str(data), str(tmp_path), {"max_new_tokens": 6, **decode}, MOMENTS])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert json.loads(done.stdout) == [0] + [-signal.SIGKILL, 0] * len(MOMENTS)
    assert len(results(tmp_path / "whole")[0].splitlines()) == NUM_ROWS
    names = {file.name for file in (tmp_path / "whole").iterdir()}
    for i, moment in enumerate(MOMENTS):
        assert results(tmp_path / str(i)) == results(tmp_path / "whole"), moment
        assert {file.name for file in (tmp_path / str(i)).iterdir()} == names, moment
    resumed = [json.loads((tmp_path / str(i) / "metrics.json").read_text())["num_resumed_rows"] for i in (0, 1, 3, 10)]
    assert resumed == [0, 0, 4, NUM_ROWS]


def test_totals_are_of_all_rows_and_the_speed_of_this_process(chatty: Path, tmp_path: Path, data: Path) -> None:
    run_predict(job(chatty, data), tmp_path / "whole", dump)
    unfinished(chatty, data, tmp_path / "out")
    run_predict(job(chatty, data, {"max_errors": 0}), tmp_path / "out", dump)  # the counted error is done
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    expected, out = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "out"))
    for name in ("num_prompts", "num_errors", "num_prompt_tokens", "num_generated_tokens"):
        assert expected[name] == out[name]
    assert expected["num_resumed_rows"] == 0
    assert 0 < out["num_resumed_rows"] < NUM_ROWS
    assert out["tokens_per_s"] * out["generate_s"] < out["num_generated_tokens"] - 1


def with_(run: RunConfig, **groups: dict[str, Any]) -> RunConfig:
    return replace(run, **{name: replace(getattr(run, name), **values) for name, values in groups.items()})


def change_weights(model: Path) -> None:
    os.utime(model / "model.safetensors", ns=(0, 0))


def change_tokenizer(model: Path) -> None:
    file = model / "tokenizer_config.json"
    file.write_text(file.read_text() + "\n")


@each(
    ("change", "named"),
    [
        (lambda run, _: with_(run, decode={"seed": 4, "min_new_tokens": 2}), ["decode.min_new_tokens (0 -> 2)", "decode.seed (null -> 4)"]),
        (lambda run, _: with_(run, model={"max_length": 64}), ["model.max_length (null -> 64)"]),
        (lambda run, _: with_(run, predict={"add_special_tokens": False}), ["predict.add_special_tokens (true -> false)"]),
        (lambda run, model: change_weights(model) or run, ["model/model.safetensors"]),
        (lambda run, model: change_tokenizer(model) or run, ["model/tokenizer_config.json"]),
        (lambda run, _: Path(run.predict.data).write_text("{}\n") and run, ["input"]),
    ])  # fmt: skip
def test_changes_are_refused_by_name(
    chatty: Path, tmp_path: Path, data: Path, change: Callable[[RunConfig, Path], RunConfig], named: list[str]
) -> None:
    model = tmp_path / "model"
    subprocess.run(["cp", "-a", str(chatty), str(model)], check=True)
    unfinished(model, data, tmp_path / "out")
    before = (tmp_path / "out" / journal.NAME).read_bytes()
    run = change(job(model, data, {"resume": str(tmp_path / "out")}), model)
    with pytest.raises(UserError) as raised:
        run_predict(run, tmp_path / "new", dump)
    changes = (
        str(raised.value)
        .split("cannot be resumed, because these values changed: ")[1]
        .split(". Restore the old values")[0]
    )
    assert [part for part in changes.split("), ") if not any(part.startswith(name.rstrip(")")) for name in named)] == []
    assert all(name in changes for name in named)
    assert (tmp_path / "out" / journal.NAME).read_bytes() == before
    assert not (tmp_path / "new").exists()


def test_other_batches_threads_and_places_are_the_same_job(chatty: Path, tmp_path: Path, data: Path) -> None:
    run_predict(job(chatty, data), tmp_path / "whole", dump)
    unfinished(chatty, data, tmp_path / "out")
    subprocess.run(["cp", "-a", str(chatty), str(tmp_path / "model")], check=True)
    moved = data.rename(tmp_path / "moved.jsonl")
    run = job(tmp_path / "model", moved, {"resume": str(tmp_path / "out")})
    run = with_(run, predict={"batch_size": 2}, device={"threads": 1, "block_size": 8})
    run_predict(run, tmp_path / "new", dump)
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    assert not (tmp_path / "new").exists()


def test_the_same_command_resumes_the_job(chatty: Path, tmp_path: Path, data: Path) -> None:
    first, second = (tmp_path / f"2026-11-21_10-00-00-00000{i}" for i in range(2))
    unfinished(chatty, data, first)
    run_predict(job(chatty, data, temperature=1.0), second, dump)  # another job, which begins again
    run_predict(job(chatty, data), tmp_path / "2026-11-21_10-00-00-000002", dump)
    assert len(results(first)[0].splitlines()) == NUM_ROWS
    assert sorted(file.name for file in tmp_path.iterdir()) == [first.name, second.name, data.name]


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    monkeypatch.setattr(sys, "stdin", open(reader, encoding="utf-8"))  # noqa: SIM115 (read by the job)


def test_standard_input_is_compared_row_by_row(
    chatty: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = data.read_text()
    feed(monkeypatch, text)
    unfinished(chatty, Path("-"), tmp_path / "out")
    named = job(chatty, "-", {"resume": str(tmp_path / "out")})
    feed(monkeypatch, text.replace('"id": 0', '"id": 100'))
    with pytest.raises(UserError, match="row 0 differs from the row that .* contains: give the same input"):
        run_predict(named, tmp_path / "new", dump)
    feed(monkeypatch, text.splitlines(keepends=True)[0])
    with pytest.raises(UserError, match="the input has 1 rows, but .* has a row . that is done: give the same input"):
        run_predict(named, tmp_path / "new", dump)
    feed(monkeypatch, text)
    run_predict(named, tmp_path / "new", dump)
    run_predict(job(chatty, data), tmp_path / "whole", dump)
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_another_standard_input_leaves_the_journal_as_it_was(
    chatty: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = data.read_text().splitlines(keepends=True)
    feed(monkeypatch, "".join(lines))
    unfinished(chatty, Path("-"), tmp_path / "out")
    before = (tmp_path / "out" / journal.NAME).read_bytes()
    for wrong in (["nope\n", *lines[1:]], [*lines[1:], *lines[:1]], ["nope\n"] * len(lines)):
        feed(monkeypatch, "".join(wrong))
        with pytest.raises(UserError, match="row . differs from the row that .* contains: give the same input"):
            run_predict(job(chatty, "-", {"resume": str(tmp_path / "out")}), tmp_path / "new", dump)
        assert (tmp_path / "out" / journal.NAME).read_bytes() == before


def test_settings_that_json_writes_otherwise_resume_too(chatty: Path, tmp_path: Path, data: Path) -> None:
    unfinished(chatty, data, tmp_path / "out", logit_bias={70: 2.5})
    run_predict(job(chatty, data, logit_bias={70: 2.5}), tmp_path / "out", dump)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["num_resumed_rows"] > 0


def test_empty_standard_input_leaves_nothing(chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, "\n \n")
    with pytest.raises(UserError, match="standard input has no prompts"):
        run_predict(job(chatty, "-"), tmp_path / "out", dump)
    assert not (tmp_path / "out").exists()


@each("most", [0, 1])
def test_too_many_errors_end_the_job_and_keep_its_rows(chatty: Path, tmp_path: Path, most: int) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a"}\nbad\n{}\n' + '{"prompt": "b"}\n' * 5)
    message = rf"more than predict.max_errors={most} rows failed; the first is row 1: not a JSON object.*; {most + 1} rows are done"
    with pytest.raises(UserError, match=message):
        run_predict(job(chatty, data, {"max_errors": most}), tmp_path / "out", dump)
    assert not (tmp_path / "out" / "predictions.jsonl").exists()
    if most == 0:
        with pytest.raises(UserError, match="the first is row 2: "):
            run_predict(job(chatty, data, {"max_errors": 0}), tmp_path / "out", dump)
    run_predict(job(chatty, data, {"max_errors": 0}), tmp_path / "out", dump)
    assert len(results(tmp_path / "out")[0].splitlines()) == 8


@each("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_after_its_step(
    chatty: Path,
    tmp_path: Path,
    data: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, handlers = journal.Journal.append, [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def append(self: journal.Journal, record: dict[str, Any]) -> None:
        real(self, record)
        if self.num_rows == 1:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(journal.Journal, "append", append)
    with pytest.raises(SystemExit) as raised:
        run_predict(job(chatty, data), tmp_path / "out", dump)
    assert raised.value.code == 128 + number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    errors = capsys.readouterr().err
    command = f"go on with: python run.py predict.resume={tmp_path / 'out'}\n"
    assert errors == f"interrupted: 3 rows are done and kept, {command}"  # all three that ended in that step
    run_predict(job(chatty, data), tmp_path / "out", dump)
    assert f"resuming {tmp_path / 'out'}: 3 rows are done\n" in capsys.readouterr().err


@pytest.mark.long
def test_a_disk_that_is_full_keeps_what_is_done(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.txt"
    data.write_text("Once upon a time\n" * 60)
    command = [sys.executable, "-B", "run.py", "device=cpu", f"model.path={chatty}", f"predict.data={data}"]
    command += ["model.dtype=float32", "decode.max_new_tokens=6", "device.threads=1"]

    out = tmp_path / "out"
    limited = 'ulimit -f 8; exec "$@"'  # KiB of any file; Python ignores the signal that comes with the error
    bash = ["bash", "-c", limited, "bash", *command, f"hydra.run.dir={out}"]
    full = subprocess.run(bash, cwd=REPOSITORY, capture_output=True, text=True)
    assert full.returncode == 1, full.stderr
    assert f"error: {out} cannot be written (File too large): " in full.stderr
    assert len(said(full.stderr).splitlines()) == 1
    lines = (out / journal.NAME).read_bytes().splitlines(keepends=True)
    assert len(lines) > 5
    assert lines[-1].endswith(b"}\n")
    assert f": {len(lines) - 1} rows are done and kept, go on with: python run.py predict.resume={out}" in full.stderr
    for arguments in ([f"predict.resume={out}"], [*command[3:], f"hydra.run.dir={tmp_path / 'whole'}"]):
        done = run_command(*arguments)
        assert done.returncode == 0, done.stderr
    assert results(out) == results(tmp_path / "whole")


MEMORY = """
import contextlib, sys
from pathlib import Path
from conf.compose import dump
from conf.schema import DecodeConfig, DeviceConfig, DeviceType, ModelConfig, RunConfig
from conf.tasks import PredictConfig
from pipelines.tasks.predict import run_predict

model, data = sys.argv[1:]
decode, device = DecodeConfig(max_new_tokens=1), DeviceConfig(DeviceType.cpu, threads=1)
run = RunConfig(model=ModelConfig(path=model), decode=decode, device=device, predict=PredictConfig(data=data, batch_size=64))
with contextlib.redirect_stdout(None):
    run_predict(run, Path(data).with_suffix(""), dump)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@true_starts()
def peak_memory_mb(chatty: Path, data: Path, num_rows: int) -> float:
    data.write_text("".join(json.dumps({"prompt": "a", "id": "x" * 8000}) + "\n" for _ in range(num_rows)))
    command = [sys.executable, "-c", MEMORY, str(chatty), str(data)]
    return int(subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout) / 1000


@pytest.mark.long
def test_memory_does_not_grow_with_the_rows(chatty: Path, tmp_path: Path) -> None:
    few, many = (peak_memory_mb(chatty, tmp_path / f"{num_rows}.jsonl", num_rows) for num_rows in (200, 2_000))
    assert (
        many - few < 12
    )  # measured: below 1. The rows of the second job take 16 MB when read, and as much when written
