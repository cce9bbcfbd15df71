"""sweep.select, sweep.baseline, and the intervals in the table and the picture, from jobs' files."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import matplotlib.axes
import pytest
from scipy.stats import binomtest

from conf.compose import options_over_saved
from conf.selection import parse_selection
from pipelines.tasks.sweep_choice import choose
from pipelines.tasks.sweep_jobs import SweepJob
from tests.helpers.sweep_folders import leave, rows, write

SELECT = "kl_mean<=0.01, peak_memory<=12GB, max decode_tokens_per_s"


def settings(select: str | None = None, baseline: int = 0) -> dict[str, Any]:
    return {"select": select, "baseline": baseline, "halving": False}


def measured(kl: float, high: float | None, peak: float, speed: float) -> dict[str, Any]:
    interval = None if high is None else [2 * kl - high, high]
    return {"kl_mean": kl, "kl_mean_ci95": interval, "peak_memory_bytes": peak, "decode_tokens_per_s": speed}


def jobs_of(folder: Path, select: str, *metrics: dict[str, Any] | None) -> Path:
    for i, values in enumerate(metrics):
        error = "no memory" if values is None else None
        leave(folder / str(i), ["task=bench", f"quant={i}"], values, error, settings=settings(select))
        (folder / str(i) / "config.yaml").write_text(
            f"# Run again: python run.py --config-path {folder / str(i)}\na: {i}\n"
        )
    return folder


def test_the_best_job_satisfies_the_constraints_with_the_unfavourable_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = jobs_of(
        tmp_path / "sweep", SELECT,
        measured(0.001, 0.002, 11e9, 10.0),
        measured(0.008, 0.009, 11e9, 20.0),
        measured(0.009, 0.011, 11e9, 30.0),  # only the value of the KL divergence is below the bound
        measured(0.008, None, 13e9, 40.0),  # too much memory
        measured(0.008, 0.009, 11e9, 20.0),  # equal to a better row, which is first
        measured(0.009, 0.0095, 11.5e9, 19.0),  # dominated
        None,
        {"decode_tokens_per_s": 99.0},
    )  # fmt: skip
    assert write(folder) == f"1 of 8 jobs failed: see {folder}/sweep.md"
    assert [row["choice"] for row in rows(folder)] == ["front", "chosen", "front", "front", "front", "", "", ""]
    assert "| quant | choice | KL divergence |" in (folder / "sweep.md").read_text()
    printed = capsys.readouterr().out
    assert f"sweep.select chose job 1 (quant=1): run.py --config-path {folder}/best\n" in printed
    best = (folder / "best" / "config.yaml").read_text()
    assert best == f"# Run again: python run.py --config-path {folder}/best\na: 1\n"
    assert options_over_saved([f"--config-path={folder}/best"])[:2] == ["--config-path", f"{folder}/best"]

    for job in folder.glob("?"):  # the same folder again, with nothing to choose
        (job / "job.json").write_text((job / "job.json").read_text().replace("0.01", "-1"))
    assert (
        "; no job satisfies sweep.select: closest is job 0 (quant=0), whose kl_mean is 0.002 at the upper end"
        in str(write(folder))
    )
    assert not (folder / "best").exists()


def test_without_a_choice_the_error_says_why(tmp_path: Path) -> None:
    first, second = measured(0.02, None, 11e9, 10.0), measured(0.011, 0.015, 12.5e9, 20.0)
    kl = "no job satisfies sweep.select: closest is job 1 (quant=1), whose kl_mean is 0.015 at the upper end of its interval, "
    for number, (select, metrics, error) in enumerate((
        (SELECT, [first, second], kl + "0.005 from the bound of kl_mean<=0.01"),
        ("decode_tokens_per_s>=30, min kl_mean", [first, second],
         "no job satisfies sweep.select: closest is job 1 (quant=1), whose decode_tokens_per_s is 20, "
         "10 from the bound of decode_tokens_per_s>=30"),
        ("max accuracy", [first, second], "sweep.select has accuracy, which no job measured: there are kl_mean, "
         "peak_memory_bytes, decode_tokens_per_s"),
        (SELECT, [{"kl_mean": 0.1}, first | {"kl_mean": None}],
         "no job measured all of decode_tokens_per_s, kl_mean, peak_memory_bytes, which sweep.select needs"),
        (SELECT, [None], "1 of 1 jobs failed: see FOLDER/sweep.md"),
        ("max accuracy", [{"accuracy": 0.5}], ""),
    )):  # fmt: skip
        folder = jobs_of(tmp_path / str(number), select, *metrics)
        assert re.fullmatch(
            error.replace("(", r"\(").replace(")", r"\)").replace("FOLDER", str(folder)), write(folder) or ""
        )
    (folder / "0" / "config.yaml").unlink()
    assert write(folder) == "job 0 was chosen, but its config.yaml is gone: run the sweep again"
    assert rows(folder)[0]["choice"] == "chosen"  # the table is written nevertheless


def test_the_front_is_the_skyline() -> None:
    """Compared with the definition by sorting: in the order of the objective, the running best of the constraint."""
    numbers = random.Random(0)
    for _ in range(50):
        points = [(numbers.randint(0, 9), numbers.randint(0, 9)) for _ in range(numbers.randint(1, 12))]
        jobs = [SweepJob(str(i), {}, {"accuracy": a, "weight_bytes": w}, None) for i, (a, w) in enumerate(points)]
        choice = choose(jobs, parse_selection("weight<=5, max accuracy"))
        skyline, least = set[tuple[int, int]](), math.inf
        for accuracy, weight in sorted(points, key=lambda point: (-point[0], point[1])):
            if weight < least:
                skyline, least = skyline | {(accuracy, weight)}, weight
        assert {i for i, point in enumerate(points) if point in skyline} == choice.front
        allowed = [accuracy for accuracy, weight in points if weight <= 5]
        assert (None if choice.chosen is None else points[choice.chosen][0]) == max(allowed, default=None)


def leave_samples(folder: Path, quant: str, shift: float, right: list[int], baseline: int, data: str = "a") -> None:
    """Write an evaluation whose windows have 10 tokens, and `shift` more nats per token than the first job's."""
    metrics = {
        "perplexity": 12.3142, "perplexity_stderr": 0.0831, "perplexity_ci95": [12.15, 12.48],
        "accuracy": 0.625, "accuracy_stderr": 0.0171, "accuracy_ci95": [0.59, 0.66], "kl_mean": 0.0123,
        "kl_mean_stderr": None, "kl_mean_ci95": None, "weight_bytes": 4_000_000, "evaluate_s": 1.0,
        "tasks": {"own": {"acc": 0.5, "acc_stderr": 0.25, "acc_ci95": [0.01, 0.99]}},
    }  # fmt: skip
    leave(folder, [f"quant={quant}"], metrics, settings=settings(baseline=baseline))
    samples: list[dict[str, Any]] = [
        {"kind": "window", "id": f"0:{i}", "input": f"{data}{i}", "num_tokens": 10, "nll": 10 * (2 + i + shift), "kl": 10 * shift,
         "num_agreed": 9}
        for i in range(8)
    ]  # fmt: skip
    samples += [{"kind": "question", "id": str(i), "input": f"q{i}", "score": score} for i, score in enumerate(right)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def test_cells_have_intervals_and_differences_from_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bars: list[Any] = []
    monkeypatch.setattr(matplotlib.axes.Axes, "errorbar", lambda *args, **options: bars.append((args[1:], options)))
    right = [1, 0] * 10
    more = [1, 1] * 3 + [1, 0] * 7  # 3 questions more
    for baseline in (0, 1, 7):
        folder = tmp_path / str(baseline)
        leave_samples(folder / "0", "none", 0.0, right, baseline)
        leave_samples(folder / "1", "int8", 0.02, more, baseline)
        leave_samples(folder / "2", "other", 0.02, more, baseline, data="b")
        leave(folder / "3", ["quant=failed"], error="no memory", settings=settings(baseline=baseline))
        (folder / "3" / "samples.jsonl").write_text("of an earlier sweep")
        error = f"1 of 4 jobs failed: see {folder}/sweep.md"
        assert write(folder) == error + (
            "; sweep.baseline=7 is no row of the table: give 0 to 3" if baseline == 7 else ""
        )
    lines = (tmp_path / "0" / "sweep.md").read_text().splitlines()
    assert lines[0] == (
        "| job | quant | own.acc | accuracy (%) | perplexity | KL divergence | weights (MB) | accuracy difference (%) | "
        "perplexity ratio | KL difference | error |"
    )
    shown = "0.5 ± 0.2 | 62.5 ± 1.7 | 12.31 ± 0.08 | 0.0123 | 4.00"
    assert lines[2] == f"| 0 | none | {shown} | - | - | - |  |"
    assert lines[3].startswith(f"| 1 | int8 | {shown} | 15 [")
    assert lines[3].endswith(" | 1.02020 [1.02020, 1.02020] | 0.0200 [0.0200, 0.0200] |  |")
    assert lines[4] == f"| 2 | other | {shown} | - | - | - |  |"
    first, second, other, failed = rows(tmp_path / "0")
    # each window has the same difference, so that the interval is a point
    for name, value in (("perplexity_ratio", math.exp(0.02)), ("kl_mean_difference", 0.02)):
        for end in ("", "_low", "_high"):
            assert float(second[name + end]) == pytest.approx(value, rel=1e-12)  # float64 sums in another order
    assert float(second["accuracy_difference"]) == 0.15
    assert float(second["accuracy_difference_p"]) == binomtest(3, 3).pvalue
    assert 0 < 0.15 - float(second["accuracy_difference_low"]) < 0.3
    assert {first["perplexity_ratio"], other["perplexity_ratio"], failed["perplexity_ratio"]} == {""}
    assert (second["accuracy_ci95_low"], second["accuracy_ci95_high"]) == ("0.59", "0.66")
    assert "nll_per_token_difference" not in second
    assert float(rows(tmp_path / "1")[0]["perplexity_ratio"]) == pytest.approx(math.exp(-0.02), rel=1e-12)
    assert "perplexity_ratio" not in rows(tmp_path / "7")[0]
    assert caplog.messages.count("job 2 has no differences, because the baseline measured other data") == 2
    (args, options), *_ = bars  # perplexity over weights
    assert args == (4.0, 12.3142)
    assert options["xerr"] is None
    assert [float(length) for (length,) in options["yerr"]] == pytest.approx([12.3142 - 12.15, 12.48 - 12.3142])
