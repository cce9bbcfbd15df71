"""Standard errors, intervals and comparisons of task=evaluate, against formulas, R and values computed by hand."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.compose import dump, replayed
from conf.errors import Difference, UserError
from conf.quantization import QuantConfig, QuantScheme
from conf.schema import Task
from conf.tasks import EvaluateConfig, PredictConfig
from pipelines.jobs import uncertainty
from pipelines.jobs.uncertainty import MIN_WINDOWS
from pipelines.tasks import evaluate as evaluate_task
from pipelines.tasks.evaluate_baseline import read_baseline
from pipelines.tasks.evaluate_compare import check_gate, compare, comparison_table
from pipelines.tasks.evaluate_samples import Sample, by_key, write_samples
from pipelines.tasks.launch import launch
from pipelines.tasks.replay import run_replay
from tests.helpers.builders import REPOSITORY, run_config

TINY = REPOSITORY / "models" / "tiny"


def test_spreads_are_those_of_formulas_and_of_numpy() -> None:
    # Wilson's intervals in Newcombe, Statistics in Medicine 17 (1998), pages 857 to 872, table I
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (num_right, total), interval in published.items():
        spread = uncertainty.share(num_right, total)
        assert spread is not None
        assert spread.interval == pytest.approx(interval, abs=5e-5)  # printed with four digits
        p = num_right / total
        assert spread.stderr == pytest.approx(math.sqrt(p * (1 - p) / total))
    draws = np.random.default_rng(1)
    counts = [100] * 60
    sums = draws.gamma(9.0, 30.0, 60)
    spread = uncertainty.ratio(list(sums), counts, 0)
    assert spread is not None
    assert spread.stderr == pytest.approx(sums.std() / 100 / math.sqrt(60), rel=0.03)  # of 10,000 draws: 1 %
    tokens = [draws.exponential(1.0, 50) for _ in range(40)]
    spread = uncertainty.percentile(tokens, 0.99, 0)
    picked = [np.concatenate([tokens[i] for i in draws.integers(0, 40, 40)]) for _ in range(1000)]
    expected = [float(np.quantile(part, 0.99)) for part in picked]
    assert spread is not None
    assert spread.stderr == pytest.approx(np.std(expected), rel=0.1)  # two times 1,000 draws
    assert spread.interval == pytest.approx(np.quantile(expected, [0.025, 0.975]), rel=0.05)
    assert uncertainty.share(1, 1) is uncertainty.ratio([1.0], [1], 0) is uncertainty.percentile([sums], 0.9, 0) is None
    for num_windows in (MIN_WINDOWS - 1, MIN_WINDOWS):
        few = uncertainty.ratio(list(sums[:num_windows]), [100] * num_windows, 0)
        assert few is not None
        assert few.stderr > 0
        assert (few.interval is None) == (num_windows < MIN_WINDOWS)
    assert uncertainty.ratio([1e5] * 9, [1] * 9, 0, np.exp) is None  # beyond the largest float


def right_of(gained: int, lost: int, both: int, neither: int) -> tuple[list[bool], list[bool]]:
    now = [True] * gained + [False] * lost + [True] * both + [False] * neither
    return now, [False] * gained + [True] * lost + [True] * both + [False] * neither


def test_paired_differences_are_those_of_r_and_of_formulas() -> None:
    # Tango's interval of the R packages ratesci and PropCIs: scoreci.mp(7, 1, 21, 0.95), Bentur's patients
    bentur = uncertainty.accuracy_difference(*right_of(1, 7, 1, 12))
    assert bentur.value == pytest.approx(-6 / 21)
    assert bentur.interval == pytest.approx((-0.517, -0.026), abs=5e-4)  # printed with three digits
    assert bentur.p == pytest.approx(2 * 9 / 2**8)  # McNemar's exact test: 0 or 1 of 8 coins, on two sides
    # The exact McNemar test of the R package exact2x2 for the votes of mcnemar.test's example
    assert uncertainty.accuracy_difference(*right_of(86, 150, 794, 570)).p == pytest.approx(3.716e-05, rel=1e-4)
    z2 = 1.959963984540054**2
    for num_questions in (1, 10, 100):  # no answer changed
        same = uncertainty.accuracy_difference(*right_of(0, 0, num_questions, 0))
        end = z2 / (num_questions + z2)
        assert (same.value, same.p) == (0, 1)
        assert same.interval == pytest.approx((-end, end))
    for total in range(1, 9):
        for gained in range(total + 1):
            for lost in range(total + 1 - gained):
                now, before = right_of(gained, lost, total - gained - lost, 0)
                forth, back = uncertainty.accuracy_difference(now, before), uncertainty.accuracy_difference(before, now)
                assert forth.interval is not None
                assert back.interval is not None
                low, high = forth.interval
                assert -1 <= low <= forth.value <= high <= 1
                assert high - low > 0.3
                assert (low, high) == pytest.approx((-back.interval[1], -back.interval[0]))
    draws = np.random.default_rng(2)
    other_sums = list(draws.gamma(9.0, 30.0, 80))
    sums = [value + change for value, change in zip(other_sums, draws.normal(5.0, 10.0, 80), strict=True)]
    changes = np.subtract(sums, other_sums) / 100
    difference = uncertainty.ratio_difference(sums, other_sums, [100] * 80, 0)
    assert difference.value == pytest.approx(changes.mean())
    half = 1.959963984540054 * changes.std() / math.sqrt(80)
    # The bootstrap of a mean of 80 is close to a normal distribution. The ends of 10,000 draws vary by 2 %.
    assert difference.interval == pytest.approx((changes.mean() - half, changes.mean() + half), abs=0.1 * half)
    assert difference.p == pytest.approx(2 / 10_001)  # no draw has the other sign
    assert uncertainty.ratio_difference(sums, sums, [100] * 80, 0) == (0.0, (0.0, 0.0), 1.0)
    assert uncertainty.ratio_difference(sums[:5], other_sums[:5], [100] * 5, 0)[1:] == (None, None)


def window(number: int, nll: float) -> Sample:
    return {"kind": "window", "id": f"0:{number}", "input": "", "num_tokens": 1, "nll": nll}


def document(number: int, filter: str, exact: float, f1: float) -> Sample:
    metrics = {"exact_match": exact, "f1": f1} if filter == "strict" else {"exact_match": exact}
    return {
        "kind": "document", "id": f"t:{number}:{filter}", "task": "t", "filter": filter, "input": "", "metrics": metrics,
    }  # fmt: skip


def test_metrics_of_samples_and_ends_of_intervals_decide_a_gate() -> None:
    before = [window(i, 1.0) for i in range(9)]
    now = [window(i, 1.0 + 1000.0 * (i + 1)) for i in range(9)]
    comparison = compare(by_key(now), by_key(before), 0)
    written = json.loads(comparison.as_json(), parse_constant=pytest.fail)  # neither Infinity nor NaN
    assert written["metrics"]["perplexity_ratio"]["difference"] is written["metrics"]["perplexity_ratio"]["now"] is None
    assert written["metrics"]["perplexity_ratio"]["ci95"] == [None, None]
    assert [changed["id"] for changed in written["changed"][:2]] == ["0:8", "0:7"]
    assert comparison_table(comparison)["difference"] == ["+5000", "inf"]
    with pytest.raises(Difference, match="perplexity_ratio is inf, and the high end inf of its 95 % interval is above"):
        check_gate({"perplexity_ratio": 1e300}, {}, comparison)
    short = compare(by_key(now[:5]), by_key(before[:5]), 0)
    assert short.metrics["nll_per_token"].difference == (3000.0, None, None)
    assert comparison_table(short)["95 % interval"] == ["-", "-"]

    before = [document(i, filter, 1, 0.5) for i in range(20) for filter in ("strict", "flexible")]
    now = [document(i, "strict", i % 2, 0.5 + i / 100) for i in range(20)] + [
        document(i, "flexible", 1, 0) for i in range(20)
    ]
    metrics = compare(by_key(now), by_key(before), 0).metrics
    assert {name: compared.difference.value for name, compared in metrics.items()} == pytest.approx(
        {"tasks.t.exact_match.strict": -0.5, "tasks.t.f1": 0.095, "tasks.t.exact_match.flexible": 0.0}
    )
    assert metrics["tasks.t.exact_match.strict"].difference.p == pytest.approx(2 / 2**10)

    rows: list[Sample] = [{"kind": "question", "id": str(i), "input": "", "score": 1} for i in range(100)]
    same = compare(by_key(rows), by_key(rows), 0)
    check_gate({"accuracy": -0.04, "kl_mean": 0.02}, {"kl_mean": 0.01, "kl_mean_ci95": [0.0, 0.02]}, same)
    message = (
        r"^the gate is not passed: accuracy is \+0, and the low end -0.036993 of its 95 % interval is below -0.03; "
        "kl_mean is 0.01, and the high end 0.02 of its 95 % interval is above 0.019$"
    )
    with pytest.raises(Difference, match=message):
        check_gate({"accuracy": -0.03, "kl_mean": 0.019}, {"kl_mean": 0.01, "kl_mean_ci95": [0.0, 0.02]}, same)


def test_a_folder_that_is_no_earlier_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluate.against=.*/nowhere is not a folder: give the folder of a finished"):
        read_baseline(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"has no samples.jsonl: give the folder of a finished task=evaluate"):
        read_baseline(str(tmp_path))
    question = {"kind": "question", "id": "0", "input": "", "score": 1, "answer": "a\u2028b\ud800"}
    good = write_samples([window(0, 1.5), question])
    (tmp_path / "samples.jsonl").write_text(good, encoding="utf-8")
    assert read_baseline(str(tmp_path)).samples[("question", "0")] == question
    for content, problem in (
        ("", "line 1 is not JSON"),
        (good[:-9], "line 2 is not JSON"),
        ("[1]\n", "line 1 is not a sample"),
        (good.replace("question", "answer"), "line 2 is not a sample"),
        (good.replace("1.5", "NaN"), "line 1 has no valid nll"),
        (good.replace("1.5", "1" + "0" * 9999), "line 1 is not JSON"),
        (good.replace("1.5", "1" + "0" * 400), "line 1 has no valid nll"),
        (good.replace('"num_tokens": 1', '"num_tokens": 0'), "line 1 has no valid num_tokens"),
        (good.replace('"score": 1', '"score": "x"'), "line 2 has no valid score"),
        (write_samples([document(0, "strict", 1, 1)]).replace("1}", "null}"), "line 1 has no valid metrics"),
        ("\udcff", "line 1 is not JSON"),
    ):
        (tmp_path / "samples.jsonl").write_text(content, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(UserError, match=rf"samples.jsonl is damaged \(.*{problem}.*: evaluate that model again"):
            read_baseline(str(tmp_path))


class Runs:
    """Runs of task=evaluate in folders, on one text and three questions. `floats` is a finished one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text, self.questions = folder, folder / "text.txt", folder / "questions.jsonl"
        self.text.write_text("red car, blue house, seven apples and two dogs. " * 40, encoding="utf-8")
        rows = [{"prompt": f"Say {word}", "answer": word} for word in ("one", "two", "three")]
        self.questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.run("floats")
        self.floats = str(folder / "floats")

    def run(self, out: str, scheme: str = "none", **evaluate: Any) -> dict[str, Any]:
        """Run and return the metrics."""
        files = {"data": str(self.text), "questions": str(self.questions), "reference": str(TINY)}
        run, settings = run_config(TINY), EvaluateConfig(**({"window": 32} | files | evaluate))
        run = replace(run, task=Task.evaluate, model=replace(run.model, tokenizer=""), predict=PredictConfig())
        launch(replace(run, quant=QuantConfig(QuantScheme[scheme]), evaluate=settings), self.folder / out, dump)
        return self.read(out, "metrics.json")

    def read(self, out: str, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / out / name).read_text()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUINTET_OUTPUTS", str(tmp_path_factory.mktemp("outputs")))
        yield Runs(tmp_path_factory.mktemp("runs"))


def test_a_run_is_compared_with_an_earlier_one_on_the_same_data(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = runs.read("floats", "metrics.json")
    low, high = metrics["perplexity_ci95"]
    assert low < metrics["perplexity"] < high
    samples = [json.loads(line) for line in (runs.folder / "floats" / "samples.jsonl").read_text().splitlines()]
    windows = [sample for sample in samples if sample["kind"] == "window"]
    assert math.fsum(w["nll"] for w in windows) / sum(w["num_tokens"] for w in windows) == metrics["nll_per_token"]
    assert [sample["expected"] for sample in samples if sample["kind"] == "question"] == ["one", "two", "three"]
    runs.run("again", against=runs.floats, gate={"perplexity_ratio": 1.0, "accuracy": -0.6, "kl_mean": 0})
    comparison = runs.read("again", "comparison.json")
    assert comparison["changed"] == []
    ratio = comparison["metrics"]["perplexity_ratio"]
    assert (ratio["difference"], ratio["ci95"], ratio["p"]) == (1.0, [1.0, 1.0], 1.0)
    with pytest.raises(Difference, match="the gate is not passed: perplexity_ratio is") as raised:
        runs.run("int4", "int4", against=runs.floats, gate={"perplexity_ratio": 0.5})
    assert raised.value.exit_code == 3
    ratio, now = runs.read("int4", "comparison.json")["metrics"]["perplexity_ratio"], runs.read("int4", "metrics.json")
    assert ratio["difference"] == pytest.approx(now["perplexity"] / metrics["perplexity"])
    assert ratio["ci95"][0] < ratio["difference"] < ratio["ci95"][1]
    assert (ratio["before"], ratio["now"]) == pytest.approx((metrics["perplexity"], now["perplexity"]))
    assert (runs.folder / "int4" / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    inputs = runs.read("int4", "run.lock")["files"].keys()
    assert {"evaluate.against/samples.jsonl", "evaluate.against/run.lock"} <= inputs
    replay = replayed(["--replay", str(runs.folder / "int4")])
    assert replay is not None
    capsys.readouterr()
    run_replay(*replay, dump)
    assert capsys.readouterr().out.endswith("\nequal\n")
    runs.run("again")
    assert not (runs.folder / "again" / "comparison.json").exists()  # of the earlier run in this folder


def test_other_data_is_refused_before_anything_is_scored(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("nothing is scored")

    for name in ("score", "ask"):
        monkeypatch.setattr(evaluate_task, name, fail)
    text, questions = (file.with_name(f"other{file.suffix}") for file in (runs.text, runs.questions))
    text.write_text(runs.text.read_text().replace("two dogs", "two cars", 1), encoding="utf-8")
    questions.write_text(runs.questions.read_text().replace("three", "four"))
    lock = runs.folder / "floats" / "run.lock"
    files = json.loads(lock.read_text())["files"]
    settings: tuple[tuple[dict[str, Any], str], ...] = (
        ({"window": 16}, r"measured \d+ windows, and this run \d+: give that run's evaluate.data, "),
        ({"data": str(text)}, r"(measured another window 0:\d+|measured \d+ windows, and this run \d+): give that"),
        ({"questions": str(questions)}, "measured another question 2: give that run's evaluate.questions"),
        ({"questions": None}, "measured 3 questions, and this run 0: give that run's evaluate.questions"),
        ({"tasks": ["pick"]}, "measured no evaluate.tasks: leave them out, or give a run that has them"),
        ({"window": 256, "gate": {"kl_mean": 1}, "against": None}, "gate.kl_mean needs an interval of at least 6 win"),
    )
    for other, message in settings:
        with pytest.raises(UserError, match=message):
            runs.run("refused", **({"against": runs.floats} | other))
    weights = next(name for name in files if name.startswith("evaluate.reference/") and name.endswith(".safetensors"))
    for content, message in (
        (
            json.dumps({"files": files | {weights: {"sha256": "0"}}}),
            "had another evaluate.reference, because model.safe",
        ),
        ("{}", "has no run.lock that names its evaluate.reference"),
    ):
        lock.write_text(content)
        with pytest.raises(UserError, match=message):
            runs.run("refused", against=runs.floats)
    assert not (runs.folder / "refused").exists()
