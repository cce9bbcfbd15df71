"""The table of a sweep: made from what its jobs left, whatever stands in their overrides and errors."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from pipelines.sweep import recorded_job, write_sweep

METRICS = {
    "decode_tokens_per_s": 123.456,
    "time_to_first_token_s": {"p50": 0.0123, "p90": 0.02},
    "peak_memory_bytes": 512_000_000,
    "unused_fields": ["x"],
}


def leave(folder: Path, overrides: list[str], metrics: dict[str, Any] | None = None, error: str | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"overrides": overrides, "error": error}))
    if metrics is not None:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def rows(sweep_dir: Path) -> list[dict[str, str]]:
    with open(sweep_dir / "sweep.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_columns_are_what_differs_and_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        leave(tmp_path / "0", ["task=bench", "decode=greedy"], METRICS),
        leave(tmp_path / "1", ["task=bench", "decode=beam"], {**METRICS, "decode_tokens_per_s": 20}),
    ]
    assert write_sweep(folders) is None
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


def test_a_failed_job_is_a_row_with_its_error(tmp_path: Path) -> None:
    folders = [
        leave(tmp_path / "0", ["a=1"], METRICS),
        leave(
            tmp_path / "1", ["a=2"], METRICS, error="decode.top_p=7 is | not\nallowed"
        ),  # metrics of an earlier sweep
    ]
    assert write_sweep(folders) == f"1 of 2 jobs failed: see {tmp_path}/sweep.md"
    good, bad = rows(tmp_path)
    assert (good["error"], bad["error"], bad["decode_tokens_per_s"]) == ("", "decode.top_p=7 is | not\nallowed", "")
    assert r"decode.top_p=7 is \| not<br>allowed |" in (tmp_path / "sweep.md").read_text()


def test_if_all_failed_there_is_a_table_and_no_picture(tmp_path: Path) -> None:
    (tmp_path / "sweep.png").write_bytes(b"of an earlier sweep")
    assert write_sweep([leave(tmp_path / "0", ["decode=greedy", "a=b"], error="x")])
    assert rows(tmp_path)[0]["decode"] == "greedy"  # nothing differs, so all overrides are shown
    assert not (tmp_path / "sweep.png").exists()


def test_overrides_are_shown_as_they_were_meant(tmp_path: Path) -> None:
    values = ["'a, b'", '"it\'s"', "今天|天气", r"x\,y", "$math_1$ " + "long " * 40, "\ud800"]
    folders = [leave(tmp_path / str(i), [f"predict.data={value}"], METRICS) for i, value in enumerate(values)]
    write_sweep(folders)
    shown = [row["predict.data"] for row in rows(tmp_path)]
    assert shown[:4] == ["a, b", "it's", "今天|天气", "x,y"]
    assert shown[5] == "\\ud800"
    assert r"今天\|天气" in (tmp_path / "sweep.md").read_text(encoding="utf-8")


def test_accuracy_adds_a_panel(tmp_path: Path) -> None:
    write_sweep([leave(tmp_path / "one" / "0", ["a=1"], METRICS)])
    write_sweep([leave(tmp_path / "two" / "0", ["a=1"], {**METRICS, "accuracy": 0.5})])
    widths = [int.from_bytes((tmp_path / name / "sweep.png").read_bytes()[16:20], "big") for name in ("one", "two")]
    assert widths[1] > 1.5 * widths[0]


QUALITY = {"perplexity": 5.25, "load_s": 1.0, "weight_bytes": 4_000_000, "peak_memory_bytes": 480_000_000}
SPEED = {**METRICS, "load_s": 2.0, "weight_bytes": 4_000_000}


def size_of_picture(sweep_dir: Path) -> tuple[int, int]:
    header = (sweep_dir / "sweep.png").read_bytes()[:24]
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_an_evaluation_of_schemes_shows_weights_and_draws_quality_over_them(tmp_path: Path) -> None:
    for i, quant in enumerate(("none", "int8", "int4")):
        leave(tmp_path / str(i), ["task=evaluate", f"quant={quant}"], {**QUALITY, "weight_bytes": 8_000_000 >> i})
    write_sweep([tmp_path / str(i) for i in range(3)])
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    assert lines[0] == "| job | quant | perplexity | weights (MB) | peak memory (MB) |"
    assert [line.split(" | ")[3] for line in lines[2:]] == ["8.00", "4.00", "2.00"]
    assert size_of_picture(tmp_path)[0] > 500


def test_jobs_that_differ_in_the_task_alone_share_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [(task, quant) for task in ("bench", "evaluate") for quant in ("none", "int8")]
    folders = [
        leave(tmp_path / str(i), [f"task={task}", f"quant={quant}"], SPEED if task == "bench" else QUALITY)
        for i, (task, quant) in enumerate(jobs)
    ]
    assert write_sweep(folders) is None
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    heading = (
        "| job | quant | perplexity | decode (tokens/s) | first token p50 (ms) | weights (MB) | peak memory (MB) |"
    )
    assert lines[0] == heading
    assert lines[2:] == [
        "| 0 + 2 | none | 5.2500 | 123 | 12.3 | 4.00 | 512 |",
        "| 1 + 3 | int8 | 5.2500 | 123 | 12.3 | 4.00 | 512 |",
    ]
    first, _ = rows(tmp_path)  # all metrics; what the tasks measured otherwise has the task's name
    assert (first["weight_bytes"], first["bench.load_s"], first["evaluate.load_s"]) == ("4000000", "2.0", "1.0")
    peaks = [first[f"{prefix}peak_memory_bytes"] for prefix in ("", "bench.", "evaluate.")]
    assert peaks == ["512000000", "512000000", "480000000"]  # the row has the largest, too
    assert "123" in capsys.readouterr().out
    write_sweep([leave(tmp_path / "alone" / "0", ["task=evaluate"], QUALITY)])
    assert size_of_picture(tmp_path)[0] > 1.5 * size_of_picture(tmp_path / "alone")[0]  # speed over quality, too


def test_a_joined_row_has_the_errors_of_its_jobs_and_tasks_twice_are_not_joined(tmp_path: Path) -> None:
    folders = [
        leave(tmp_path / "0", ["task=bench", "quant=int8"], SPEED),
        leave(tmp_path / "1", ["task=evaluate", "quant=int8"], error="no text"),
        leave(tmp_path / "2", ["task=bench", "quant=int4"], SPEED),
        leave(tmp_path / "3", ["task=bench", "quant=int4"], SPEED),
    ]
    assert write_sweep(folders) == f"1 of 4 jobs failed: see {tmp_path}/sweep.md"
    joined, third, fourth = rows(tmp_path)
    assert (joined["job"], joined["error"], joined["decode_tokens_per_s"]) == ("0 + 1", "evaluate: no text", "123.456")
    assert (third["job"], third["task"], fourth["job"]) == ("2", "bench", "3")


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (UserError("give less"), "give less"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (RuntimeError("two\nlines\x1b[2J"), "RuntimeError: two lines\x1b[2J"),
        (None, None),
    ],
)
def test_an_error_ends_one_job(
    tmp_path: Path, raised: Exception | None, error: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0").mkdir()
    with recorded_job(tmp_path / "0", ["a=1"], []):
        if raised:
            raise raised
    assert json.loads((tmp_path / "0" / "job.json").read_text()) == {"overrides": ["a=1"], "error": error}
    printed = capsys.readouterr().err
    assert ("Traceback" in printed) == isinstance(raised, RuntimeError)
    assert "\x1b" not in printed  # a terminal would obey it


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_ends_the_sweep_and_the_job_says_so(tmp_path: Path, raised: BaseException) -> None:
    (tmp_path / "0").mkdir()
    with pytest.raises(type(raised)), recorded_job(tmp_path / "0", [], []):
        raise raised
    assert json.loads((tmp_path / "0" / "job.json").read_text())["error"] == "did not finish"


def test_two_jobs_in_one_folder_are_refused(tmp_path: Path) -> None:
    folders: list[Path] = []
    with recorded_job(tmp_path, [], folders):
        pass
    with (
        pytest.raises(UserError, match="two jobs of the sweep would write .*: give hydra.sweep.subdir="),
        recorded_job(tmp_path, [], folders),
    ):
        pass
