"""Decode speed of rows with LoRA adapters relative to rows without, and the seconds that loading an adapter takes.

`python tests/bench/adapters.py model.path=FOLDER device=cpu`. For each format four variants take turns in one process:
rows without adapters in an engine without adapters, rows without adapters in an engine with eight, one row with an
adapter, and eight rows with one adapter each. The adapters are random and change all linear layers of the decoder. The
medians of the ratios are written to tests/bench/results/adapters.json; new rows replace old rows of the same
measurement.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))


from conf.compose import compose_run_config  # noqa: E402
from conf.decoding import DecodeConfig  # noqa: E402
from pipelines.engine import Engine  # noqa: E402
from pipelines.jobs.report import environment, write_atomically  # noqa: E402
from pipelines.loading.load_engine import load_engine  # noqa: E402
from tests.helpers.random_adapters import write_random_adapter  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "adapters.json"
PROMPT_TOKENS, NUM_ADAPTERS = 64, 8


def decode_speed(engine: Engine, names: list[str | None], decode: DecodeConfig) -> float:
    """Return the decoded tokens per second after the first token of every row, with a row for each name."""
    chosen = random.Random(1)
    prompts = [[chosen.randrange(5, engine.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in names]
    requests = [
        engine.request(i, prompt, decode, adapter=name)
        for i, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    outputs = list(engine.generate(requests))
    first = max(output.first_token_s or 0.0 for output in outputs)
    num_tokens = sum(len(output.completions[0].token_ids) - 1 for output in outputs)
    return num_tokens / (max(output.finished_s for output in outputs) - first)


def token_s(engine: Engine, name: str) -> float:
    """Return the seconds of a request that generates one token after one prompt token."""
    start = time.perf_counter()
    list(engine.generate([engine.request(0, [5], DecodeConfig(max_new_tokens=1, prefix_cache=False), adapter=name)]))
    return time.perf_counter() - start


def measure(plain: Engine, engine: Engine, folder: Path, decode: DecodeConfig, rounds: int) -> dict[str, Any]:
    """Return the speeds relative to the plain engine, and the seconds to read an adapter and to fill a slot."""
    names = [str(i) for i in range(NUM_ADAPTERS)]
    ratios: dict[str, list[float]] = {
        "one row without": [],
        "one row with": [],
        "eight rows without": [],
        "eight rows with": [],
    }
    load_s, speeds = [], []
    for turn in range(rounds + 1):  # warm-up
        one, eight = (decode_speed(plain, [None] * count, decode) for count in (1, NUM_ADAPTERS))
        rows = {
            "one row without": decode_speed(engine, [None], decode) / one,
            "one row with": decode_speed(engine, [names[0]], decode) / one,
            "eight rows without": decode_speed(engine, [None] * NUM_ADAPTERS, decode) / eight,
            "eight rows with": decode_speed(engine, [*names], decode) / eight,
        }
        start = time.perf_counter()
        engine.load_adapter(names[0], folder)
        read_s = time.perf_counter() - start
        # the first request fills its slot
        load_s.append(read_s + token_s(engine, names[0]) - token_s(engine, names[0]))
        if turn:
            speeds.append(one)
            for name, ratio in rows.items():
                ratios[name].append(ratio)
    row = {"plain_tokens_per_s": round(statistics.median(speeds), 2)}
    row |= {f"ratio of {name}": round(statistics.median(values), 3) for name, values in ratios.items()}
    return row | {"load_s": round(statistics.median(load_s[1:]), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["none", "int4"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="+")
    args = parser.parse_args()
    report: dict[str, Any] = json.loads(args.results.read_text()) if args.results.is_file() else {"rows": {}}
    decode = DecodeConfig(max_new_tokens=args.new_tokens, temperature=0.0, ignore_eos=True, prefix_cache=False)
    for scheme in args.formats:
        run = compose_run_config([*args.overrides, f"quant={scheme}"])
        plain, engine = (load_engine(run, NUM_ADAPTERS) for _ in range(2))
        with tempfile.TemporaryDirectory() as folder:
            written = [
                write_random_adapter(Path(folder) / str(i), plain.executor.model, args.rank, i, std=0.01)
                for i in range(NUM_ADAPTERS)
            ]
            for path in written:
                engine.load_adapter(path.name, path)
            row = measure(plain, engine, written[0], decode, args.rounds)
        name = f"{Path(run.model.path).name}, {scheme}, rank {args.rank}"
        report["rows"][name] = row
        print(f"{name}: {row}", flush=True)
        about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
        write_atomically(args.results, [json.dumps(about | {"rows": report["rows"]}, indent=2) + "\n"])


if __name__ == "__main__":
    main()
