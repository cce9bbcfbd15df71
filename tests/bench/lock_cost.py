"""Cost of run.lock for a run: `python tests/bench/lock_cost.py model.path=FOLDER device=cpu decode.max_new_tokens=64`.

Each round starts three new processes of task=predict: without run.lock, with hashes that are kept, and with no hash
kept, as in the first run of a model. Prints the medians of the seconds of the task, of loading and of generating, and
the bytes that were hashed. Overrides: as for run.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

WAYS = ("without run.lock", "hashes are kept", "no hash is kept")
TIMES = ("task", "load_s", "generate_s")


def once(way: str, folder: Path, overrides: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from conf.compose import compose_run_config, dump
    from pipelines.jobs.run_lock import LOCK
    from pipelines.tasks.launch import launch
    from pipelines.tasks.predict import run_predict

    run = compose_run_config([*overrides, "predict.resume=none"])
    task, start = run_predict if way == WAYS[0] else launch, time.perf_counter()
    task(run, folder, dump)
    times = {"task": time.perf_counter() - start}
    metrics = json.loads((folder / "metrics.json").read_bytes())
    times |= {name: metrics[name] for name in TIMES[1:]}
    files = json.loads((folder / LOCK).read_bytes())["files"] if way != WAYS[0] else {}
    print(json.dumps(times | {"bytes": sum(file["bytes"] for file in files.values())}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.way:
        once(args.way, args.folder, args.overrides)
        return
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as base:
        for number in range(args.rounds + 1):  # the first round reads the files into the page cache
            for way in WAYS:
                kept = Path(base) / ("kept" if way == WAYS[1] else f"outputs-{number}")
                folder = Path(base) / f"{WAYS.index(way)}-{number}"
                command = [sys.executable, __file__, "--way", way, "--folder", str(folder), *args.overrides]
                environment = {"QUINTET_OUTPUTS": str(kept)}
                rows[way].append(_run(command, environment))
    medians = {way: _medians(measured[1:]) for way, measured in rows.items()}
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from pipelines.jobs.report import environment

    about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
    print(json.dumps({**about, "overrides": args.overrides, "rounds": args.rounds, **medians}, indent=2))


def _run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _medians(measured: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in measured), 3) for name in (*TIMES, "bytes")}


if __name__ == "__main__":
    main()
