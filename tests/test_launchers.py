"""Sweeps from the command line, with any launcher and any sweeper: the jobs' return values, and the table at the
end."""

import csv
import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.command import run, run_interrupted

SEARCHING = '''
import json
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Doubling(Sweeper):
    """Each job asks for twice the tokens that the last one is said to have generated."""

    def __init__(self, **options): ...

    def setup(self, **context):
        self.config = context["config"]
        self.launcher = Plugins.instance().instantiate_launcher(**context)

    def sweep(self, arguments):
        values = [[1]]
        for number in range(3):
            overrides = [*arguments, f"decode.max_new_tokens={2 * values[-1][0]:.0f}"]
            (job,) = self.launcher.launch([overrides], initial_job_idx=number)
            values.append(job.return_value)
        Path(self.config.hydra.sweep.dir, "values.json").write_text(json.dumps(values))
'''

SBATCH = """#!/bin/sh
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
echo "Submitted batch job 7"
export SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
(for SLURM_ARRAY_TASK_ID in $(seq 0 "$last"); do sh "$1"; done) > "$SLURM_LOG" 2>&1 &
"""
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case "$1" in --output|--error) shift 2 ;; *) shift ;; esac; done
exec "$@"
"""


def table(sweep_dir: Path) -> list[dict[str, str]]:
    with open(sweep_dir / "sweep.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured(metric: str) -> bool:
    """Return whether two runs differ in it. A metric that a row's tasks share has one column, and otherwise one per
    task."""
    return metric.endswith("_s") or any(part in metric for part in ("_s.p", "peak_memory", "decode_share"))


def without_times(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{name: row[name] for name in row if not measured(name)} for row in rows]


@pytest.mark.long
def test_launchers_give_equal_tables(chatty: Path, tmp_path: Path) -> None:
    """With jobs that fail, and over tasks, each of which has settings of its own."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little girl. " * 9)
    arguments = [
        "-m", "task=bench,evaluate", "model.max_length=64,9999", "device=cpu", f"model.path={chatty}",
        f"evaluate.data={text}", "evaluate.window=32", "bench.prompt_tokens=9", "bench.new_tokens=3", "bench.repeats=1",
    ]  # fmt: skip
    launchers = {"basic": [], "joblib": ["hydra.launcher.n_jobs=2"]}
    for name, options in launchers.items():
        done = run(*arguments, f"hydra/launcher={name}", *options, f"hydra.sweep.dir={tmp_path / name}", cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"error: 2 of 4 jobs failed: see {tmp_path / name}/sweep.md"
        assert {"sweep.csv", "sweep.md", "sweep.png"} < {file.name for file in (tmp_path / name).iterdir()}
    basic, joblib = (without_times(table(tmp_path / name)) for name in launchers)
    assert {"job", "model.max_length", "perplexity", "weight_bytes", "error"} <= basic[0].keys()
    assert basic == joblib
    headings = [(tmp_path / name / "sweep.md").read_text().splitlines()[0] for name in launchers]
    assert headings[0] == headings[1]
    assert [(row["job"], bool(row["error"])) for row in joblib] == [
        ("0 + 2", False), ("1 + 3", True),
    ]  # fmt: skip


@pytest.mark.long
def test_jobs_of_submitit_give_the_table_of_the_basic_launcher(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of this machine, and as tasks of a Slurm array, which two scripts simulate."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    for name, script in (("sbatch", SBATCH), ("srun", SRUN)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_LOG", str(tmp_path / "slurm.log"))
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little girl. " * 9)
    arguments = [
        "-m", "task=evaluate", "model.max_length=64,9999", "device=cpu", f"model.path={chatty}",
        f"evaluate.data={text}", "evaluate.window=32",
    ]  # fmt: skip
    tables = []
    for name in ("basic", "submitit_local", "submitit_slurm"):
        done = run(*arguments, f"hydra/launcher={name}", f"hydra.sweep.dir={tmp_path / name}")
        assert done.stderr.splitlines()[-1] == f"error: 1 of 2 jobs failed: see {tmp_path / name}/sweep.md", done.stderr
        tables.append(without_times(table(tmp_path / name)))
    assert [bool(row["error"]) for row in tables[0]] == [False, True]
    assert tables[1:] == [tables[0], tables[0]]
    assert "#SBATCH --array=0-1%2" in next(tmp_path.glob("submitit_slurm/.submitit/**/*.sh")).read_text()


def test_a_launcher_that_cannot_run_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run(
        "-m", "hydra/launcher=submitit_slurm", "decode.max_new_tokens=2,3", f"hydra.sweep.dir={tmp_path / 'sweep'}"
    )
    assert (done.returncode, done.stderr) == (
        1,
        "error: hydra/launcher=submitit_slurm needs Slurm, and there is no srun here: start the sweep on a machine of the "
        "cluster, or give hydra/launcher=submitit_local\n",
    )
    assert not (tmp_path / "sweep").exists()
    done = run("hydra/launcher=joblib", "decode.max_new_tokens=2")
    assert done.returncode == 1
    assert done.stderr == (
        "error: hydra/launcher=joblib is not used by a run alone: leave it out, or give -m for a sweep\n"
    )


@pytest.mark.long
def test_a_sweep_shows_what_drafts_gain_in_one_table(chatty: Path, tmp_path: Path) -> None:
    """The command of docs/speculation.md, with drafts of a fixed length, so that a short row has some."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Once upon a time", "a b a b a b")))
    arguments = [
        "-m", "decode.speculate=none,ngram", f"predict.data={rows}", f"model.path={chatty}", "device=cpu",
        "decode.speculation.adaptive=false", "decode.speculation.min_ngram=1", "decode.max_new_tokens=60",
        "decode.ignore_eos=true", f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]  # fmt: skip
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plain, drafted = table(tmp_path / "sweep")
    assert [row["decode.speculate"] for row in (plain, drafted)] == ["none", "ngram"]
    assert plain["acceptance"] == ""
    assert 0 < int(drafted["num_accepted_tokens"]) <= int(drafted["num_drafted_tokens"])
    assert float(drafted["acceptance"]) == int(drafted["num_accepted_tokens"]) / int(drafted["num_drafted_tokens"])
    heading, _, *lines = (tmp_path / "sweep" / "sweep.md").read_text().splitlines()
    assert {"decode.speculate", "speed (tokens/s)", "drafts accepted (%)"} < set(map(str.strip, heading.split("|")))
    assert len(lines) == 2
    predictions = [(tmp_path / "sweep" / job / "predictions.jsonl").read_bytes() for job in "01"]
    assert predictions[0] == predictions[1]


@pytest.mark.long
def test_a_sweeper_searches_by_what_the_jobs_hand_back(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "hydra_plugins" / "searching" / "__init__.py"  # where Hydra looks for them
    plugin.parent.mkdir(parents=True)
    plugin.write_text(SEARCHING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    saved = run("device=cpu", f"model.path={chatty}", "predict.data=Once", f"hydra.run.dir={tmp_path / 'saved'}")
    assert saved.returncode == 0, saved.stderr
    arguments = [
        "-m", "--config-path", str(tmp_path / "saved"), "decode.ignore_eos=true", f"hydra.sweep.dir={tmp_path}",
        "hydra.sweeper._target_=hydra_plugins.searching.Doubling",
    ]  # fmt: skip
    done = run(*arguments, "sweep.objective=[num_generated_tokens,weight_bytes]")
    assert done.returncode == 0, done.stderr
    rows = table(tmp_path)
    assert [row["decode.max_new_tokens"] for row in rows] == ["2", "4", "8"]
    num_bytes = float(rows[0]["weight_bytes"])
    values = json.loads((tmp_path / "values.json").read_text())
    assert values == [[1], [2, num_bytes], [4, num_bytes], [8, num_bytes]]
    again = run("--config-path", str(tmp_path / "2"), f"hydra.run.dir={tmp_path / 'again'}")
    assert again.returncode == 0, again.stderr  # a job of the sweep runs alone, where an objective is not used


@pytest.mark.long
def test_optuna_searches_schemes_and_a_bound_selects(tmp_path: Path) -> None:
    """The command of docs/sweeps.md, with two trials."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    (tmp_path / "text.txt").write_text("Once upon a time, there was a little girl. " * 9)
    done = run(
        "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=0", "hydra.sweeper.direction=[minimize,minimize]",
        "sweep.objective=[perplexity,peak_memory_bytes]", "sweep.select=peak_memory<=1TB, min perplexity",
        "task=evaluate", "quant=int8,int4", "quant.group_size=32,64", "quant.kv_cache=none,int8",
        f"evaluate.data={tmp_path / 'text.txt'}", "evaluate.window=16", "device=cpu", f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = table(tmp_path / "sweep")
    assert [row["job"] for row in rows] == ["0", "1"]
    best = min(rows, key=lambda row: float(row["perplexity"]))
    assert best["choice"] == "chosen"
    assert f"sweep.select chose job {best['job']}" in done.stdout
    saved = (tmp_path / "sweep" / best["job"] / "config.yaml").read_text().partition("\n")[2]
    assert (tmp_path / "sweep" / "best" / "config.yaml").read_text().partition("\n")[2] == saved
    assert "solutions" in (tmp_path / "sweep" / "optimization_results.yaml").read_text()


@pytest.mark.long
def test_an_objective_that_is_not_a_metric_ends_the_sweep_at_its_first_job(chatty: Path, tmp_path: Path) -> None:
    arguments = ["device=cpu", f"model.path={chatty}", "predict.data=Once", "decode.max_new_tokens=2,3"]
    done = run("-m", *arguments, "sweep.objective=tokens_per_sec", f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: sweep.objective=tokens_per_sec is no metric of the job: there are num_prompts, ")
    assert error.endswith("did you mean tokens_per_s?")
    (row,) = table(tmp_path)
    assert float(row["tokens_per_s"]) > 0  # the job's measurements are not lost


@pytest.mark.long
def test_ctrl_c_leaves_the_table_of_what_was_done(chatty: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("Once upon a time\n" * 5)
    arguments = ["device=cpu", f"model.path={chatty}", f"predict.data={tmp_path / 'rows.txt'}", "predict.batch_size=1"]
    arguments += ["decode.max_new_tokens=1,2,3", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    done = run_interrupted(signal.SIGINT, tmp_path / "sweep" / "1", 3, "-m", *arguments)
    assert done.returncode == 128 + signal.SIGINT
    assert "interrupted: 3 rows are done and kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert [(row["decode.max_new_tokens"], row["error"]) for row in table(tmp_path / "sweep")] == [
        ("1", ""), ("2", "did not finish"),
    ]  # fmt: skip
    assert done.stdout.endswith(f"output: {tmp_path / 'sweep'}\n")
