"""The command as a user types it: real processes, real files."""

import csv
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.compose import compose_run_config, for_hydra, quote_prompt
from conf.errors import UserError
from tests.helpers.builders import REPOSITORY, said
from tests.helpers.cases import each
from tests.helpers.command import run, run_interrupted
from tests.helpers.fork_server import true_starts

FILES = {
    *("config.yaml", "environment.json", "metrics.json", "predictions.jsonl", "text_generation_result.txt"),
    "run.lock",
    "run.log",
}


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_leaves_all_its_files_and_runs_again_from_its_config(chatty: Path, tmp_path: Path) -> None:
    prompt = "I love Beijing, because [it's] 好 = ${x}"
    arguments = ["decode=sampling", "decode.seed=5", "decode.max_new_tokens=9", "model.dtype=float32"]
    first = tmp_path / "first"
    done = run(
        "device=cpu",
        f"model.path={chatty}",
        f"predict.data={prompt}",
        *arguments,
        f"hydra.run.dir={first}",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in first.iterdir()} == FILES
    (row,) = rows(first)
    assert list(row) == [
        "index", "id", "prompt", "text", "token_ids", "finish_reason", "num_prompt_tokens", "num_generated_tokens",
        "seed", "error",
    ]  # fmt: skip
    assert (row["prompt"], row["error"]) == (prompt, None)
    assert prompt in done.stdout
    assert str(first) in done.stdout
    assert "tokens/s" in done.stdout
    assert "start (imports)" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr  # no colours and no progress bar without a terminal
    metrics = json.loads((first / "metrics.json").read_text())
    assert metrics["num_prompt_tokens"] == row["num_prompt_tokens"]
    assert metrics["num_generated_tokens"] == row["num_generated_tokens"] == len(row["token_ids"])  # type: ignore[arg-type]
    assert min(metrics[name] for name in ("start_s", "load_s", "generate_s", "tokens_per_s", "peak_memory_bytes")) > 0
    environment = json.loads((first / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith("2.")
    assert environment["cpu"]
    again = run("--config-path", str(first), f"hydra.run.dir={tmp_path / 'again'}", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert rows(tmp_path / "again") == rows(first)
    changed = run(
        "--config-path", "first", "decode.max_new_tokens=2", cwd=tmp_path
    )  # relative to the user's current folder
    assert changed.returncode == 0, changed.stderr
    (beside,) = [folder for folder in tmp_path.iterdir() if folder.name.startswith("20")]
    assert rows(beside)[0]["num_generated_tokens"] == 2


def test_batch_job_with_bad_rows(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "job.jsonl"
    lines = [
        '{"id": "a", "prompt": "Once"}', "", '{"prompt": "x", "answer": 4}', "not json", '{"prompt_token_ids": [0, 400]}',
        '{"id": 7, "messages": [{"role": "user", "content": "hi"}], "decode": {"max_new_tokens": 2, "logprobs": 1}}',
        '{"src": "Once", "tgt": "upon"}', '{"prompt": "Once", "decode": {"temprature": 1}}',
    ]  # fmt: skip
    data.write_text("\r\n".join(lines), encoding="utf-8")
    out = tmp_path / "out"
    done = run(
        "device=cpu",
        f"model.path={chatty}",
        f"predict.data={data}",
        "decode.max_new_tokens=5",
        "predict.batch_size=2",
        f"hydra.run.dir={out}",
    )
    assert done.returncode == 0, done.stderr
    result = rows(out)
    assert [row["index"] for row in result] == list(range(7))
    assert [row["id"] for row in result] == ["a", None, None, None, 7, None, None]
    assert [row["finish_reason"] == "error" for row in result] == [False, False, True, True, False, False, True]
    assert "not a JSON object" in str(result[2]["error"])
    assert "prompt token id 400 is not in the vocabulary" in str(result[3]["error"])
    assert "decode.temprature does not exist" in str(result[6]["error"])
    assert result[0]["token_ids"] == result[5]["token_ids"]
    assert len(result[4]["logprobs"]) == result[4]["num_generated_tokens"]  # type: ignore[arg-type]
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["num_prompts"], metrics["num_errors"], metrics["num_blank_lines"]) == (7, 3, 1)
    assert metrics["unused_fields"] == ["answer", "tgt"]
    assert "answer" in done.stdout
    texts = (out / "text_generation_result.txt").read_text(encoding="utf-8").splitlines()
    assert texts[0] == str({"text_generation_text": ["Once" + str(result[0]["text"])]})
    assert len(texts) == 7


def test_standard_input_and_folder_of_the_run(chatty: Path, tmp_path: Path) -> None:
    done = run("device=cpu", f"model.path={chatty}", "predict.data=-", "decode.max_new_tokens=3", stdin="one\n\n今天\n")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.rsplit("output: ", 1)[1].strip())
    assert folder.parent == REPOSITORY / "outputs" / "predict" / chatty.name
    assert [row["prompt"] for row in rows(folder)] == ["one", "今天"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode.temprature=1"], "'temprature' not in 'DecodeConfig': there are max_new_tokens"),
        pytest.param(["model.path=/nowhere"], "there is no folder /nowhere", marks=pytest.mark.long),
        pytest.param(["predict.data=nowhere.txt"], "predict.data=nowhere.txt cannot be read", marks=pytest.mark.long),
        (["predict.data=\x1b[2J\x9b.txt"], r"predict.data=\x1b[2J\x9b.txt cannot be read"),
        pytest.param(
            ["decode.max_length=129"],
            "decode.max_length=129 is more than the model takes (max_position_embeddings=128)",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["model.max_length=129"],
            "model.max_length=129 is more than the model's max_position_embeddings=128",
            marks=pytest.mark.long,
        ),
        (["predict.data=" + "word " * 200], "the prompt has"),
    ],
    ids=["typo", "folder", "data", "control characters", "max_length", "model_max_length", "long_prompt"],
)
def test_user_errors_are_one_line_and_exit_with_1(
    chatty: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    done = run("device=cpu", f"model.path={chatty}", "predict.data=hello", f"hydra.run.dir={out}", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    if "prompt has" not in message:  # that one is the error of a row, so its row is written
        assert not out.exists()


def test_a_config_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "decode").mkdir()
    (tmp_path / "decode" / "mine.yaml").write_text("temperature: [\n")
    done = run("--config-dir", str(tmp_path), "decode=mine")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: while parsing")
    assert f'"{tmp_path}/decode/mine.yaml", line 2' in line


def test_a_config_that_is_not_utf_8_is_shown(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(
        'defaults: [schema/run]\npredict: {data: "café"}\ntask: predict\n'.encode("latin-1")
    )
    done = run("--config-path", str(tmp_path))
    assert done.returncode == 1
    fault = "a file of the config is not UTF-8, in the line 'predict: {data: \"caf\\\\xe9\"}': convert it first"
    assert done.stderr == f"error: {fault}\n"


@pytest.mark.long
@each(
    ("argument", "message"),
    [
        ("~model", "~model would take away what is needed: leave it out, or give model= and one of baichuan2_13b, "),
        ("decode=null", "decode=null would take away what is needed: leave it out, or give decode= and one of beam, "),
        ("~decode.top_p", "leave it out, or give decode.top_p= and a value"),
        ("hydra.run.dir=", "hydra.run.dir= is no folder: give one, or leave it out"),
        ("decode.stop=", "is not a ListConfig, list or tuple: give a list: KEY=[a,b], or KEY=[] for none"),
        ("decode.stop=null", "'decode.stop' is not Optional: leave it out for its default"),
        ("quant.overrides=x", "Cannot assign str to Dict[str, str]: give names with values: KEY={a:b}"),
        (
            "model.path=a~b",
            """model.path=a~b cannot be read: close what is open, or give the value in quotes of its own: 'KEY="VALUE"'""",
        ),
        (
            "model.path=a(b)",
            "model.path=a(b) cannot be read: close what is open, or give the value in quotes of its own",
        ),
        (
            'decode.stop=["."',
            'decode.stop=["." cannot be read: close what is open, or give the value in quotes of its own',
        ),
        (
            "decode.stop=[。,a]",
            """decode.stop=[。,a] cannot be read: give its texts in quotes of their own: 'decode.stop=["。", "a"]'""",
        ),
        ("predict", "missing EQUAL at '<EOF>': give KEY=VALUE"),
    ],
)
def test_errors_of_hydra_have_a_remedy(argument: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        compose_run_config(for_hydra(["predict.data=hello", argument]))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    done = run("predict.data=hello", "hydra.run.dir=/proc/nowhere")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "'/proc/nowhere': give a folder that can be written as hydra.run.dir, or with" in line


@true_starts()
def start_waiting(chatty: Path, folder: Path) -> subprocess.Popen[str]:
    """Start a job whose input does not come: it stays before its first row, however long the test takes to interrupt
    it."""
    overrides = ["device=cpu", f"model.path={chatty}", "predict.data=-", f"hydra.run.dir={folder / 'out'}"]
    command = [sys.executable, "run.py", *overrides]
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def quoted(folder: Path) -> str:
    """Quote for Hydra."""
    return "'" + str(folder).replace("'", "\\'") + "'"


def wait_until(process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
    while not holds():
        assert process.poll() is None
        time.sleep(0.01)


def has_mapped(process: subprocess.Popen[str], library: str) -> bool:
    return library in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.long
@each(
    ("library", "ends"),
    [
        ("_yaml", [(-2, ""), (130, "interrupted\n")]),
        ("libtorch_cpu", [(130, "interrupted\n")]),
        ("_multiarray_umath", [(130, "interrupted\n")]),  # within torch's C++ code
    ],
)
def test_ctrl_c_before_the_first_row_leaves_nothing(
    chatty: Path, tmp_path: Path, library: str, ends: list[tuple[int, str]]
) -> None:
    process = start_waiting(chatty, tmp_path)
    wait_until(process, lambda: has_mapped(process, library))  # of the imports, or of the run itself
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) in ends
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_sigterm_before_the_first_row_leaves_nothing(chatty: Path, tmp_path: Path) -> None:
    process = start_waiting(chatty, tmp_path)
    wait_until(process, lambda: has_mapped(process, "libtorch_cpu"))
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_was_interrupted_prints_the_command_that_ends_it(
    chatty: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "it's here, {a b}"
    folder.mkdir()
    journal, data, num_rows = folder / "out" / "journal.jsonl", folder / "many.txt", 5
    data.write_text("Once upon a time\n" * num_rows)
    overrides = [
        "device=cpu",
        f"model.path={chatty}",
        f"predict.data={data}",
        "hydra.run.dir=" + quoted(folder / "out"),
    ]
    overrides += ["predict.batch_size=1", "decode.max_new_tokens=2"]
    ended = run_interrupted(number, folder / "out", 3, *overrides)
    assert ended.returncode == 128 + number
    assert not (folder / "out" / "predictions.jsonl").exists()
    assert journal.read_bytes().count(b"\n") - 1 == 3
    begin = "interrupted: 3 rows are done and kept, go on with: python "
    assert ended.stderr.startswith(begin)
    done = run(*shlex.split(ended.stderr.removeprefix(begin))[1:], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, f"resuming {folder / 'out'}: 3 rows are done\n")
    assert [row["index"] for row in rows(folder / "out")] == list(range(num_rows))
    assert {file.name for file in (folder / "out").iterdir()} == FILES
    assert {file.name for file in folder.iterdir()} == {"out", "many.txt"}
    again = run("predict.resume=" + str(folder / "out"))
    assert again.returncode == 1
    assert "has no journal.jsonl (its job is finished)" in again.stderr


def test_a_traceback_has_no_control_characters() -> None:
    """For example in a text that an unexpected exception quotes."""
    raising = r"""
import runpy, hydra
def main(**_):
    raise RuntimeError("a\x1b[2J")
hydra.main = main
runpy.run_path("run.py", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", raising], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith(r"RuntimeError: a\x1b[2J" + "\n")
    assert done.returncode == 1


@pytest.mark.long
def test_a_reader_that_has_seen_enough_is_not_an_error(chatty: Path, tmp_path: Path) -> None:
    command = (
        f"{sys.executable} run.py device=cpu model.path={chatty} predict.data=Once hydra.run.dir={tmp_path / 'out'}"
    )
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, said(done.stderr)) == (0, "")
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES


@pytest.mark.parametrize("flag", [pytest.param("--help", marks=pytest.mark.long), "--version"])
def test_a_closed_pipe_is_silent(flag: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "run.py", flag], cwd=REPOSITORY, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_version_is_our_own() -> None:
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert run("--version").stdout == f"Quintet {version}\n"


@pytest.mark.long
def test_sweep_runs_every_job(chatty: Path, tmp_path: Path) -> None:
    done = run(
        "device=cpu", f"model.path={chatty}", "predict.data=Once, it's", "-m", "decode=greedy,sampling",
        "decode.max_new_tokens=2,200", f"hydra.sweep.dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 1  # two of the jobs exceed the context
    assert [(tmp_path / job / "predictions.jsonl").exists() for job in "0123"] == [True, False, True, False]
    assert [row["prompt"] for job in "02" for row in rows(tmp_path / job)] == ["Once, it's"] * 2
    assert "error: decode.max_new_tokens=200 is more than the model takes" in done.stderr
    assert done.stderr.splitlines()[-1] == f"error: 2 of 4 jobs failed: see {tmp_path}/sweep.md"
    assert "Traceback" not in done.stderr
    table = list(csv.DictReader((tmp_path / "sweep.csv").open(newline="")))
    assert [(row["decode"], row["decode.max_new_tokens"]) for row in table] == [
        ("greedy", "2"), ("greedy", "200"), ("sampling", "2"), ("sampling", "200"),
    ]  # fmt: skip
    assert [bool(row["error"]) for row in table] == [not row["tokens_per_s"] for row in table] == [False, True] * 2
    assert {"sweep.csv", "sweep.md", "sweep.png"} < {file.name for file in tmp_path.iterdir()}


@pytest.mark.long
def test_a_sweep_over_tasks_and_schemes_is_the_table_to_choose_by(chatty: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time, there was a little girl. " * 9)
    done = run(
        "-m", "task=bench,evaluate", "quant=none,int8", "device=cpu", f"model.path={chatty}",
        f"evaluate.data={tmp_path / 'text.txt'}", "bench.prompt_tokens=9", "bench.new_tokens=3", "bench.repeats=1",
        f"hydra.sweep.dir={tmp_path / 'sweep'}", "evaluate.window=16", "sweep.baseline=1",
        "sweep.select=perplexity<=1e9, peak_memory<=1TB, min weight",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open(newline="")))
    assert [(row["job"], row["quant"]) for row in table] == [("0 + 2", "none"), ("1 + 3", "int8")]
    assert table[1]["choice"] == "chosen"
    ratio = float(table[0]["perplexity"]) / float(table[1]["perplexity"])
    assert float(table[0]["perplexity_ratio"]) == pytest.approx(ratio, rel=1e-9)  # sums of float64 in another order
    assert float(table[0]["perplexity_ratio_low"]) <= ratio <= float(table[0]["perplexity_ratio_high"])
    best = run("--config-path", str(tmp_path / "sweep" / "best"), f"hydra.run.dir={tmp_path / 'again'}")
    assert best.returncode == 0, best.stderr
    assert "scheme: int8" in (tmp_path / "again" / "config.yaml").read_text()
    shown = ("decode_tokens_per_s", "perplexity", "peak_memory_bytes")
    assert all(float(row[name]) > 0 for row in table for name in shown)
    floats, codes = (int(row["weight_bytes"]) for row in table)
    assert codes < floats
    assert (tmp_path / "sweep" / "sweep.png").is_file()


def test_a_value_of_one_job_that_is_refused_is_a_row(tmp_path: Path) -> None:
    done = run("-m", "task=bench", "decode.top_p=7", f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 1
    assert "decode.top_p=7.0 is not allowed: give a number above 0 and up to 1" in (tmp_path / "sweep.md").read_text()
    assert done.stderr.splitlines()[-1] == f"error: 1 of 1 jobs failed: see {tmp_path}/sweep.md"


def write_options(folder: Path) -> None:
    for group, option in (("decode", "mine"), ("my_group", "one")):
        (folder / group).mkdir()
        (folder / group / f"{option}.yaml").write_text("{}")


def has_options(text: str) -> bool:
    return {"  decode: beam, checkpoint, contrastive, greedy, mine, sampling", "  my_group: one"} <= {
        *text.splitlines()
    }


@pytest.mark.long
def test_help_begins_with_usage_and_five_examples_that_compose(tmp_path: Path) -> None:
    write_options(tmp_path)
    done = run("--help", "-cd", str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.startswith("usage: .venv/bin/python run.py ")
    begin = "  .venv/bin/python run.py"
    examples = [line.removeprefix(begin) for line in done.stdout.splitlines() if line.startswith(begin)]
    assert len(examples) == 5
    for example in examples:
        overrides = quote_prompt(shlex.split(example))
        values = [[override] for override in overrides]
        if overrides[:1] == ["-m"]:
            values = [[f"{key}={v}" for v in text.split(",")] for key, text in (o.split("=") for o in overrides[1:])]
        for job in itertools.product(*values):
            composed = compose_run_config(list(job))
            for file in (composed.predict.data, composed.evaluate.data):  # which exist relative to the repository
                assert not file or " " in file or (REPOSITORY / file).is_file()
    for group in ("task", "model", "parallel", "quant", "decode", "device"):
        assert f"  {group}: " in done.stdout
    assert "schema:" not in done.stdout  # Hydra's group for the types, which has no choice
    assert has_options(done.stdout)


@pytest.mark.long
def test_help_lists_options_of_ones_own(tmp_path: Path) -> None:
    write_options(tmp_path)
    for flag in ("--config-dir={}", "--config-d {}", "-cd {}"):
        template = next(a for a in for_hydra(["--help", *flag.format(tmp_path).split()]) if "hydra.help.template" in a)
        assert has_options(template), flag
