"""The table of a sweep, made from its jobs' files, with any text in their overrides and errors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from pipelines.tasks.sweep import objective, recorded_job
from pipelines.tasks.sweep_jobs import Sweep
from tests.helpers.cases import each
from tests.helpers.sweep_folders import METRICS, leave, rows, write

SETTINGS: dict[str, Any] = {"select": "max accuracy", "baseline": 1, "halving": False}
QUALITY = {"perplexity": 5.25, "load_s": 1.0, "weight_bytes": 4_000_000, "peak_memory_bytes": 480_000_000}
SPEED = {**METRICS, "load_s": 2.0, "weight_bytes": 4_000_000}


def test_columns_are_what_differs_and_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path / "0", ["task=bench", "decode=greedy"], METRICS)
    leave(tmp_path / "1", ["task=bench", "decode=beam"], {**METRICS, "decode_tokens_per_s": 20})
    assert write(tmp_path) is None
    first, second = rows(tmp_path)
    assert first == {
        "job": "0",
        "decode": "greedy",
        "decode_tokens_per_s": "123.456",
        "time_to_first_token_s.p50": "0.0123",
        "time_to_first_token_s.p90": "0.02",
        "peak_memory_bytes": "512000000",
    }
    assert second["decode"] == "beam"
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    assert lines[0] == "| job | decode | decode (tokens/s) | first token p50 (ms) | peak memory (MB) |"
    assert lines[2] == "| 0 | greedy | 123 | 12.3 | 512 |"
    printed = capsys.readouterr().out
    assert "task" not in printed
    assert "123" in printed
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_job_is_a_row_with_its_error_and_tasks_twice_are_not_joined(tmp_path: Path) -> None:
    leave(tmp_path / "0", ["a=1"], METRICS)
    leave(tmp_path / "1", ["a=2"], METRICS, error="decode.top_p=7 is | not\nallowed")  # metrics of an earlier sweep
    assert write(tmp_path) == f"1 of 2 jobs failed: see {tmp_path}/sweep.md"
    good, bad = rows(tmp_path)
    assert (good["error"], bad["error"], bad["decode_tokens_per_s"]) == ("", "decode.top_p=7 is | not\nallowed", "")
    assert r"decode.top_p=7 is \| not<br>allowed |" in (tmp_path / "sweep.md").read_text()
    tasks = tmp_path / "tasks"
    leave(tasks / "0", ["task=bench", "quant=int8"], SPEED)
    leave(tasks / "1", ["task=evaluate", "quant=int8"], error="no text")
    leave(tasks / "2", ["task=bench", "quant=int4"], SPEED)
    leave(tasks / "3", ["task=bench", "quant=int4"], SPEED)
    assert write(tasks) == f"1 of 4 jobs failed: see {tasks}/sweep.md"
    joined, third, fourth = rows(tasks)
    assert (joined["job"], joined["error"], joined["decode_tokens_per_s"]) == ("0 + 1", "evaluate: no text", "123.456")
    assert (third["job"], third["task"], fourth["job"]) == ("2", "bench", "3")


def test_if_all_failed_there_is_no_picture_and_without_jobs_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(tmp_path) is None
    assert write(tmp_path / "not there") is None
    assert not list(tmp_path.iterdir())
    assert not capsys.readouterr().out
    (tmp_path / "sweep.png").write_bytes(b"of an earlier sweep")
    leave(tmp_path / "0", ["decode=greedy", "a=b"], error="x")
    assert write(tmp_path)
    assert rows(tmp_path)[0]["decode"] == "greedy"  # nothing differs, so all overrides are shown
    assert not (tmp_path / "sweep.png").exists()


def test_overrides_are_shown_as_they_were_meant(tmp_path: Path) -> None:
    values = ["'a, b'", '"it\'s"', "今天|天气", r"x\,y", "$math_1$ " + "long " * 40, "\ud800"]
    for i, value in enumerate(values):
        leave(tmp_path / str(i), [f"predict.data={value}"], METRICS)
    write(tmp_path)
    shown = [row["predict.data"] for row in rows(tmp_path)]
    assert shown[:4] == ["a, b", "it's", "今天|天气", "x,y"]
    assert shown[5] == "\\ud800"
    assert r"今天\|天气" in (tmp_path / "sweep.md").read_text(encoding="utf-8")


def size_of_picture(sweep_dir: Path) -> tuple[int, int]:
    header = (sweep_dir / "sweep.png").read_bytes()[:24]
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_the_picture_has_panels_of_what_was_measured(tmp_path: Path) -> None:
    leave(tmp_path / "one" / "0", ["a=1"], METRICS)
    leave(tmp_path / "two" / "0", ["a=1"], {**METRICS, "accuracy": 0.5})
    write(tmp_path / "one")
    write(tmp_path / "two")
    assert size_of_picture(tmp_path / "two")[0] > 1.5 * size_of_picture(tmp_path / "one")[0]
    for i, quant in enumerate(("none", "int8", "int4")):
        quality = {**QUALITY, "weight_bytes": 8_000_000 >> i}
        leave(tmp_path / "schemes" / str(i), ["task=evaluate", f"quant={quant}"], quality)
    write(tmp_path / "schemes")
    lines = (tmp_path / "schemes" / "sweep.md").read_text().splitlines()
    assert lines[0] == "| job | quant | perplexity | weights (MB) | peak memory (MB) |"
    assert [line.split(" | ")[3] for line in lines[2:]] == ["8.00", "4.00", "2.00"]
    assert size_of_picture(tmp_path / "schemes")[0] > 500  # quality over weights


def test_jobs_that_differ_in_the_task_alone_share_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [(task, quant) for task in ("bench", "evaluate") for quant in ("none", "int8")]
    for i, (task, quant) in enumerate(jobs):
        leave(tmp_path / str(i), [f"task={task}", f"quant={quant}"], SPEED if task == "bench" else QUALITY)
    assert write(tmp_path) is None
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    heading = (
        "| job | quant | perplexity | decode (tokens/s) | first token p50 (ms) | weights (MB) | peak memory (MB) |"
    )
    assert lines[0] == heading
    assert lines[2:] == [
        "| 0 + 2 | none | 5.2500 | 123 | 12.3 | 4.00 | 512 |",
        "| 1 + 3 | int8 | 5.2500 | 123 | 12.3 | 4.00 | 512 |",
    ]
    first, _ = rows(tmp_path)  # all metrics; if tasks measure one differently, its name includes the task
    assert (first["weight_bytes"], first["bench.load_s"], first["evaluate.load_s"]) == ("4000000", "2.0", "1.0")
    peaks = [first[f"{prefix}peak_memory_bytes"] for prefix in ("", "bench.", "evaluate.")]
    assert peaks == ["512000000", "512000000", "480000000"]  # the row has the largest, too
    assert "123" in capsys.readouterr().out
    leave(tmp_path / "alone" / "0", ["task=evaluate"], QUALITY)
    write(tmp_path / "alone")
    assert size_of_picture(tmp_path)[0] > 1.5 * size_of_picture(tmp_path / "alone")[0]  # speed over quality, too


def test_rows_stand_in_the_order_of_the_jobs_and_are_of_this_sweep_alone(tmp_path: Path) -> None:
    for number in (10, 2, 0):  # folders of more than one level, as of hydra.job.override_dirname
        leave(tmp_path / f"a={number}" / str(number), [f"a={number}"], METRICS)
    leave(tmp_path / "3", ["a=3"], error="of an earlier sweep", sweep="earlier")
    (tmp_path / "4").mkdir()
    for content in ("{}", "[1]", "no JSON", json.dumps({"version": 2, "files": {}})):  # of another program
        (tmp_path / "4" / "job.json").write_text(content)
        assert write(tmp_path) is None
        assert [(row["job"], row["a"]) for row in rows(tmp_path)] == [("a=0/0", "0"), ("a=2/2", "2"), ("a=10/10", "10")]


@contextmanager
def recorded(folder: Path, sweep_dir: Path, number: int = 0, sweep: str = "this") -> Iterator[None]:
    with recorded_job(Sweep(sweep, str(sweep_dir)), folder, number, ["a=1"], SETTINGS):
        yield


@each(
    ("raised", "error"),
    [
        (UserError("give less"), "give less"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (RuntimeError("two\nlines\x1b[2J"), "RuntimeError: two lines\x1b[2J"),
        (None, None),
        (KeyboardInterrupt(), "did not finish"),
        (SystemExit(143), "did not finish"),
    ],
)
def test_an_error_ends_one_job_and_an_interrupt_the_sweep(
    tmp_path: Path, raised: BaseException | None, error: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0").mkdir()
    with (
        nullcontext() if isinstance(raised, Exception | None) else pytest.raises(type(raised)),
        recorded(tmp_path / "0", tmp_path, number=3),
    ):
        if raised:
            raise raised
    job = {"sweep": "this", "dir": str(tmp_path), "number": 3, "overrides": ["a=1"], "error": error} | SETTINGS
    assert json.loads((tmp_path / "0" / "job.json").read_text()) == job
    printed = capsys.readouterr().err
    assert ("Traceback" in printed) == isinstance(raised, RuntimeError)
    assert "\x1b" not in printed  # a terminal would interpret it


def test_a_folder_of_two_jobs_or_of_another_sweep_is_refused(tmp_path: Path) -> None:
    remedy = r"give hydra.sweep.subdir=\$\{hydra:job.num\}"
    for sweep in ("earlier", "this"):  # the files of an earlier sweep are replaced
        with recorded(tmp_path, tmp_path, sweep=sweep):
            pass
    with (
        pytest.raises(UserError, match=f"two jobs of the sweep would write {tmp_path}: {remedy}"),
        recorded(tmp_path, tmp_path, number=1),
    ):
        pass
    with (
        pytest.raises(UserError, match=f"job 1 of the sweep would write {tmp_path}, which is not in .*: {remedy}"),
        recorded(tmp_path, tmp_path / "sweep", number=1),
    ):
        pass


def test_the_objective_is_a_number_of_the_metrics(tmp_path: Path) -> None:
    leave(tmp_path / "0", [], {**METRICS, "accuracy": None, "num_errors": 0, "model": "tiny"})
    assert objective(tmp_path / "0", None) is None
    assert objective(tmp_path / "0", "decode_tokens_per_s") == 123.456
    assert objective(tmp_path / "0", "time_to_first_token_s.p90") == 0.02
    assert objective(tmp_path / "0", ["peak_memory_bytes", "num_errors"]) == [512e6, 0]
    assert objective(tmp_path / "0", ["decode_tokens_per_s"]) == [123.456]
    for without_value in ("accuracy", ["num_errors", "accuracy"]):
        assert objective(tmp_path / "0", without_value) is None
    for wrong in ("decode_tokens_per_sec", ["num_errors", "decode_tokens_per_sec"]):
        message = (
            "sweep.objective=decode_tokens_per_sec is no metric of the job: there are decode_tokens_per_s, time_.*: "
        )
        with pytest.raises(UserError, match=message + r"did you mean decode_tokens_per_s\?"):
            objective(tmp_path / "0", wrong)
    with pytest.raises(UserError, match="sweep.objective=model is no metric"):  # a text
        objective(tmp_path / "0", "model")
    leave(tmp_path / "1", [], METRICS, error="decode.top_p=7 is not allowed")
    assert objective(tmp_path / "1", "decode_tokens_per_s") is None
