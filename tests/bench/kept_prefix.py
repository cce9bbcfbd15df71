"""Time to the first token of a prompt with a kept prefix: `python tests/bench/kept_prefix.py model.path=FOLDER
device=cpu`.

Two engines over the same model, one of them with a file of task=prefix, get the same prompts in turns: the kept tokens
and 16 further tokens. Prints the medians, their ratio, the seconds that loading the file into the cache adds to a
start, and whether all log probabilities are equal.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.compose import compose_run_config, dump
from conf.decoding import DecodeConfig
from conf.schema import RunConfig
from pipelines.engine import Engine, Output
from pipelines.loading.kept_prefixes import open_kept, place_kept
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from pipelines.tasks.prefix import run_prefix

NUM_OTHERS = 16
PREFIX_CACHE = {"plain": False, "kept": True}


def keep(overrides: list[str], token_ids: list[int], folder: Path) -> Path:
    """Write the prefix file of these tokens."""
    data, output = folder / "data.jsonl", folder / "kept"
    data.write_text(json.dumps({"prompt_token_ids": token_ids}))
    run = compose_run_config([*overrides, "task=prefix", f"prefix.data={data}", f"prefix.output={output}"])
    run_prefix(run, folder / "run", dump)
    return output


def first_token(engine: Engine, prompt: list[int], prefix_cache: bool) -> tuple[float, Output]:
    """Return the seconds from the request to its first token, and the output."""
    decode = DecodeConfig(max_new_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1, prefix_cache=prefix_cache)
    start = time.monotonic()
    (output,) = engine.generate([engine.request(0, prompt, decode)])
    assert output.first_token_s is not None
    return output.first_token_s - start, output


def measured(run: RunConfig, kept: Path, token_ids: list[int], rounds: int) -> dict[str, object]:
    """Measure both engines in turns. The first round records steps and does not count."""
    engines = {"plain": load_engine(run, 1), "kept": load_engine(run, 1)}
    plan = plan_model(run.model, run.quant, resolve_model(run.model), engines["kept"].device, packed=True)
    start = time.perf_counter()
    place_kept(engines["kept"], open_kept([str(kept)], plan))
    place_s = time.perf_counter() - start
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    equal, generator = True, random.Random(1)
    for _ in range(rounds + 1):
        others = [generator.randrange(3, plan.source.shape.vocab_size) for _ in range(NUM_OTHERS)]
        outputs = {}
        for name, engine in engines.items():
            took, outputs[name] = first_token(engine, token_ids + others, PREFIX_CACHE[name])
            seconds[name].append(took)
        equal = equal and outputs["plain"].completions == outputs["kept"].completions
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "first_token_s": {name: round(value, 4) for name, value in medians.items()},
        "ratio": round(medians["plain"] / medians["kept"], 1),
        "place_s": round(place_s, 4),
        "equal_to_the_bit": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    run = compose_run_config([*args.overrides, "device.kv_cache_memory=auto"])
    generator = random.Random(0)
    token_ids = [generator.randrange(3, resolve_model(run.model).shape.vocab_size) for _ in range(args.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        kept = keep(args.overrides, token_ids, Path(folder))
        num_bytes = kept.stat().st_size
        row = measured(run, kept, token_ids, args.rounds)
    print(json.dumps({"overrides": args.overrides, "tokens": args.tokens, "kept_bytes": num_bytes, **row}))


if __name__ == "__main__":
    main()
