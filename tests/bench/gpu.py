"""Check the kernels on a GPU, then time them: `python tests/bench/gpu.py [--plan] [--only TEXT] [--minutes 8] [--out
FOLDER]`.

Needs torch, triton, transformers, safetensors, numpy and pytest. After each row it rewrites gpu.json and gpu.md, with
the GPU, the versions and the date. Each time is compared with limits of the same GPU, always measured in the same run:
bytes per second of a copy, and operations per second of a large product. A kernel that fails its test is not timed. A
row that fails, hangs or exceeds the time limit is reported as such.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from tests.bench.gpu_rows import CEILINGS, limit_s, rows  # noqa: E402
from tests.bench.supervise import Row, measured, supervise  # noqa: E402

RESULTS = Path(__file__).parent / "results"
CHECKS = {  # beginning of a row's name, and a part of the names of the tests that must pass first
    "products": "product",
    "attention": "attention",
    "experts": "mixture",
    "exact": "sampling",
    "decode": "tokens_are_the_cpus",
    "offline": "tokens_are_the_cpus",
    "prompt": "tokens_are_the_cpus",
}
CHECK_S = 200.0  # time limit of the tests


def measure(names: list[str]) -> None:
    """Measure in a separate process, which ends if the GPU stops answering, as it does after a kernel error."""
    torch.manual_seed(0)
    for name in names:
        measured(name, rows()[name][2])
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def check(wanted: set[str], seconds: float) -> dict[str, str]:
    """Return the outcome ("PASSED" or another) of each test in tests/gpu whose name contains one of these parts. Both
    files run at once."""
    deadline = time.monotonic() + seconds
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-k", " or ".join(sorted(wanted))]
    outcomes = {}
    with ExitStack() as files:
        running = []
        for file in ("tests/gpu/test_engine.py", "tests/gpu/test_kernels.py"):
            output = files.enter_context(tempfile.TemporaryFile("w+"))
            running.append((subprocess.Popen([*command, file], cwd=REPOSITORY, stdout=output), output))
        for process, output in running:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
            output.seek(0)
            print(text := output.read())
            outcomes |= dict(re.findall(r"^tests/gpu/\S+::(.+) (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE))
    return outcomes


def unchecked(name: str, outcomes: dict[str, str]) -> str | None:
    """Return why a row must not be timed, or None."""
    part = CHECKS.get(name.split()[0])
    outcomes_of_part = {test: outcome for test, outcome in outcomes.items() if part and part in test}
    if part and not outcomes_of_part:
        return f"no test of tests/gpu with {part!r} in its name came to an end"
    return next((f"{test} {outcome}" for test, outcome in outcomes_of_part.items() if outcome != "PASSED"), None)


class Results:
    """The rows measured so far, on disk."""

    def __init__(self, folder: Path, about: Row, outcomes: dict[str, str]) -> None:
        self._folder = folder
        self._result: Row = {**about, "checks": outcomes, "ceilings_per_s": {}, "rows": []}

    def add(self, row: Row) -> None:
        name, ceilings = row["name"], self._result["ceilings_per_s"]
        of, goal, _ = rows()[name]
        if name in CEILINGS and "per_s" in row:
            ceilings[name] = row["per_s"]
            ceilings |= {"int8": 2 * row["per_s"]} if name == "bf16" else {}
        elif "per_s" in row:
            row["share"] = row["per_s"] / ceilings[of] if of in ceilings else None
        self._result["rows"].append(row | {"of": of, "goal": goal})
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "gpu.json").write_text(json.dumps(self._result, indent=1) + "\n")
        (self._folder / "gpu.md").write_text(markdown(self._result))
        print(markdown_row(self._result["rows"][-1]), flush=True)


def about() -> Row:
    import triton

    gpu = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    return {"date": date.today().isoformat(), "gpu": gpu, **versions}


def markdown(result: Row) -> str:
    failed = [test for test, outcome in result["checks"].items() if outcome != "PASSED"]
    lines = [
        f"{result['gpu']}, {result['date']}, torch {result['torch']}, triton {result['triton']}, CUDA {result['cuda']}. "
        f"Tests: {len(result['checks']) - len(failed)} passed, {len(failed)} not ({', '.join(failed) or 'none'}). "
        "int8 counts as twice bf16.",
        "",
        "| | microseconds | per second | share | of | goal |",
        "|---|---|---|---|---|---|",
        *map(markdown_row, result["rows"]),
    ]
    return "\n".join(lines) + "\n"


def markdown_row(row: Row) -> str:
    goal = "" if row["goal"] is None else f"{row['goal']:,}" if row["of"] == "tokens" else f"{row['goal']:.0%}"
    if "error" in row:
        return f"| {row['name']} | not measured: {row['error']} | | | {row['of']} | {goal} |"
    share = "" if row.get("share") is None else f"{row['share']:.1%}"
    return f"| {row['name']} | {1e6 * row['seconds']:,.1f} | {row['per_s']:.4g} | {share} | {row['of']} | {goal} |"


def parser_of(description: str | None, timed: str, minutes: float) -> argparse.ArgumentParser:
    """Return the parser of the options that this program and tune_gpu.py share. `timed`: the name of the items that
    they time."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help=f"print the {timed}, and end")
    parser.add_argument("--only", default="", metavar="TEXT", help=f"{timed} whose names have this text")
    parser.add_argument("--minutes", type=float, default=minutes, help="for everything")
    return parser


def main() -> None:
    start = time.monotonic()
    parser = parser_of(__doc__, "rows", 8.0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.json and gpu.md")
    parser.add_argument("--measure", nargs="+", metavar="ROW", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure)
    names = [name for name in rows() if name in CEILINGS or args.only in name]
    if names == list(CEILINGS):
        sys.exit(f"--only={args.only} is in no row's name: see --plan")
    if args.plan or not torch.cuda.is_available():
        print("\n".join(["tests/gpu", *names]))
        sys.exit(None if args.plan else "there is no NVIDIA GPU that torch can use: nothing was measured")
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    outcomes = check({CHECKS[name.split()[0]] for name in names if name.split()[0] in CHECKS}, CHECK_S)
    results = Results(args.out, about(), outcomes)
    wrong = {name: reason for name in names if (reason := unchecked(name, outcomes))}
    supervise(
        [name for name in names if name not in wrong],
        [sys.executable, __file__, "--measure"],
        limit_s,
        lambda: start + 60 * args.minutes - time.monotonic(),
        results.add,
    )
    for name, reason in wrong.items():
        results.add({"name": name, "error": reason})
    sys.exit("tests/gpu fails: see the first line of gpu.md" if set(outcomes.values()) - {"PASSED"} else None)


if __name__ == "__main__":
    main()
