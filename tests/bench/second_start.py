"""Seconds from the start of a process to its first token: `python tests/bench/second_start.py model.path=FOLDER
quant=int8 device=cpu`.

Unless the packed model (`model.keep_packed`) already exists under outputs/packed, the first process writes it. Each
later process is new. Prints the medians of the seconds from the start to the end of the imports, to the end of loading,
and to the first of 16 tokens.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

MARKS = ("imports", "loading", "first token")


def once(started: float, overrides: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from conf.compose import compose_run_config
    from conf.decoding import DecodeConfig
    from pipelines.loading.load_engine import load_engine

    marks = [time.time()]
    engine = load_engine(compose_run_config([*overrides, "model.keep_packed=true"]), 1)
    marks.append(time.time())
    prompt = list(range(5, 21))
    next(iter(engine.generate([engine.request(0, prompt, DecodeConfig(max_new_tokens=1, temperature=0.0))])))
    marks.append(time.time())
    print(json.dumps({name: mark - started for name, mark in zip(MARKS, marks, strict=True)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--started", type=float)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.started:
        once(args.started, args.overrides)
        return
    rows = []
    for _ in range(args.rounds + 1):
        command = [sys.executable, __file__, "--started", str(time.time()), *args.overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {name: round(statistics.median(row[name] for row in rows[1:]), 2) for name in MARKS}
    first = {name: round(seconds, 2) for name, seconds in rows[0].items()}
    print(json.dumps({"overrides": args.overrides, "first start": first, "later starts": medians}))


if __name__ == "__main__":
    main()
