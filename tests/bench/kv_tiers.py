"""Time to the first token of a prefix that left the KV cache: `python tests/bench/kv_tiers.py model.path=FOLDER
device=cpu`.

A prompt has a prefix of 2,000 tokens and 16 further tokens. Its prefix is computed again, comes from the memory tier,
or comes from the file tier after a restart, which is a new process in each round. Before each round in memory other
prompts fill the cache, so that it evicts the prefix. Prints the medians, their shares of the time to compute the prefix, and
whether all log probabilities are equal.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.compose import compose_run_config
from conf.decoding import DecodeConfig
from conf.schema import RunConfig
from pipelines.engine import Engine, Output
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model

NUM_FURTHER = 16
WAYS = {"computed": "", "memory": "memory:{size}", "file": "file:{folder}:{size}"}  # their tiers
DECODE = DecodeConfig(max_new_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1)


def random_tokens(run: RunConfig, seed: int, count: int) -> list[int]:
    generator, size = random.Random(seed), resolve_model(run.model).shape.vocab_size
    return [generator.randrange(3, size) for _ in range(count)]


def engine_with(way: str, overrides: list[str], num_tokens: int, folder: Path) -> tuple[RunConfig, Engine]:
    """Return an engine whose cache holds one prompt of `num_tokens` tokens, and whose tier holds four."""
    run = compose_run_config(overrides)
    num_bytes = load_engine(run, 1).executor.kv_bytes_per_token * (num_tokens + NUM_FURTHER + 100)
    tier = WAYS[way].format(folder=folder, size=4 * num_bytes + 2**20)
    device = [f"device.kv_cache_tiers=[{tier}]", f"device.kv_cache_memory={num_bytes}"]
    run = compose_run_config([*overrides, *device])
    return run, load_engine(run, 1)


def first_token(engine: Engine, prompt: list[int], prefix_cache: bool = True) -> tuple[float, Output]:
    """Return the seconds from the request to its first token, and the output."""
    decode = DECODE if prefix_cache else DecodeConfig(**{**vars(DECODE), "prefix_cache": False})
    start = time.monotonic()
    (output,) = engine.generate([engine.request(0, prompt, decode)])
    assert output.first_token_s is not None
    return output.first_token_s - start, output


def evict(run: RunConfig, engine: Engine, num_tokens: int) -> None:
    """Fill the cache with two other prompts. The first one may leave blocks of the prefix."""
    for seed in (-1, -2):
        first_token(engine, random_tokens(run, seed, num_tokens + NUM_FURTHER))


def measured(way: str, overrides: list[str], num_tokens: int, folder: Path, rounds: range) -> list[dict[str, object]]:
    """Measure one way in this process. Each round has its own further tokens."""
    run, engine = engine_with(way, overrides, num_tokens, folder)
    prefix, rows = random_tokens(run, 0, num_tokens), list[dict[str, object]]()
    if way == "memory":
        first_token(engine, [*prefix, *random_tokens(run, 1, NUM_FURTHER)])
    elif way == "file":  # written by an earlier process; this prompt warms the process up
        first_token(engine, random_tokens(run, -3, NUM_FURTHER))
    for number in rounds:
        if way != "file":
            evict(run, engine, num_tokens)
        prompt = [*prefix, *random_tokens(run, 2 + number, NUM_FURTHER)]
        seconds, output = first_token(engine, prompt, prefix_cache=way != "computed")
        completion = output.completions[0]
        bits = repr((completion.token_ids, completion.logprobs))
        rows.append({"seconds": seconds, "cached": output.num_cached_tokens, "bits": bits})
    return rows


def write_file(overrides: list[str], num_tokens: int, folder: Path) -> None:
    """Let an engine compute the prefix and end, which completes the file."""
    run, engine = engine_with("file", overrides, num_tokens, folder)
    first_token(engine, [*random_tokens(run, 0, num_tokens), *random_tokens(run, 1, NUM_FURTHER)])


def in_process(
    args: argparse.Namespace, way: str, folder: Path, rounds: int, first: int = 0
) -> list[dict[str, object]]:
    numbers = ["--tokens", str(args.tokens), "--rounds", str(rounds), "--first", str(first)]
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder), *numbers, *args.overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [dict(row) for row in json.loads(done.stdout.splitlines()[-1])]


def report(args: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_process(args, "write", folder, 0)
        # The first round in a process records steps and does not count.
        rows = {way: in_process(args, way, folder, args.rounds + 1)[1:] for way in ("computed", "memory")}
        rows["file"] = [in_process(args, "file", folder, 1, number)[0] for number in range(1, args.rounds + 1)]
    seconds = {way: [float(str(row["seconds"])) for row in found] for way, found in rows.items()}
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    bits = {way: [row["bits"] for row in found] for way, found in rows.items()}
    return {
        "what": "Time to the first token of a prefix that left the KV cache",
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "overrides": args.overrides,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "first_token_s": {way: round(value, 4) for way, value in medians.items()},
        "spread_s": {way: [round(min(values), 4), round(max(values), 4)] for way, values in seconds.items()},
        "share_of_computed": {way: round(medians[way] / medians["computed"], 4) for way in ("memory", "file")},
        "cached_tokens": {way: [row["cached"] for row in found] for way, found in rows.items()},
        "equal_to_the_bit": bits["computed"] == bits["memory"] == bits["file"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", choices=[*WAYS, "write"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.way == "write":
        write_file(args.overrides, args.tokens, args.folder)
        print("[]")
    elif args.way:
        rounds = range(args.first, args.first + args.rounds)
        print(json.dumps(measured(args.way, args.overrides, args.tokens, args.folder, rounds)))
    else:
        print(json.dumps(report(args)))


if __name__ == "__main__":
    main()
