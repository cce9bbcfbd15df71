"""Time of steps with 64 rows guided by a JSON schema, relative to steps with 64 unguided rows.

`python tests/bench/guided_rows.py model.path=FOLDER device=cpu`. Both variants take turns in one process, with the same
prompts and token counts. The time after a row's first token counts, as wall-clock seconds and as processor seconds;
other work on the machine hardly changes the latter. The medians are written to tests/bench/results/guided_rows.json;
new rows replace old rows of the same measurement.
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
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

RESULTS = Path(__file__).parent / "results" / "guided_rows.json"
PROMPT_TOKENS = 16
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"enum": ["Paris", "London", "Beijing"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 200}  # longer than any row here


def decoding(engine: Engine, num_rows: int, decode: DecodeConfig) -> tuple[float, float]:
    """Return wall-clock and processor seconds per token of a row, after the rows' first tokens."""
    chosen = random.Random(1)
    prompts = [[chosen.randrange(5, engine.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_rows)]
    groups = [engine.add(engine.request(i, prompt, decode)) for i, prompt in enumerate(prompts)]
    while not all(group.first_token_s for group in groups):
        engine.step()
    before, wall_s, cpu_s = engine.num_generated_tokens, time.perf_counter(), time.process_time()
    while any(group.sequences for group in groups):
        engine.step()
    num_tokens = (engine.num_generated_tokens - before) / num_rows
    assert num_tokens == decode.max_new_tokens - 1, "a row has ended early"  # type: ignore[operator]
    return (time.perf_counter() - wall_s) / num_tokens, (time.process_time() - cpu_s) / num_tokens


def measure(engine: Engine, num_rows: int, decode: DecodeConfig, rounds: int) -> dict[str, Any]:
    """Return milliseconds per step, guided and unguided, and the extra time of guided rows as a share."""
    guided = replace(decode, ignore_eos=False, guide={"json_schema": SCHEMA})  # too long to end within the measurement
    times: dict[str, list[float]] = {"free_ms": [], "guided_ms": [], "free_cpu_ms": [], "guided_cpu_ms": []}
    for turn in range(rounds + 1):  # warm-up
        for name, settings in (("free", decode), ("guided", guided)):
            wall_s, cpu_s = decoding(engine, num_rows, settings)
            if turn:
                times[f"{name}_ms"].append(1000 * wall_s)
                times[f"{name}_cpu_ms"].append(1000 * cpu_s)
    row = {name: round(statistics.median(values), 3) for name, values in times.items()}
    for name, kind in (("cost", "ms"), ("cost_cpu", "cpu_ms")):
        pairs = zip(times[f"free_{kind}"], times[f"guided_{kind}"], strict=True)
        shares = [with_guide / free - 1 for free, with_guide in pairs]
        row |= {name: round(statistics.median(shares), 3), f"{name}_spread": round(max(shares) - min(shares), 3)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="options of the run, such as model.path=FOLDER")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    run = compose_run_config(args.overrides)
    engine = load_engine(run, args.rows)
    decode = DecodeConfig(temperature=0.0, max_new_tokens=args.tokens, ignore_eos=True, prefix_cache=False)
    key = {
        "model": Path(run.model.path).name,
        "quant": run.quant.scheme.name,
        "vocab_size": engine.vocab_size,
        "num_rows": args.rows,
        "num_tokens": args.tokens,
    }
    facts = {"date": date.today().isoformat(), "rounds": args.rounds, **environment()}
    row = key | measure(engine, args.rows, decode, args.rounds) | facts
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    rows = [old for old in rows if any(old.get(name) != value for name, value in key.items())]
    write_atomically(args.out, [json.dumps([*rows, row], indent=1) + "\n"])
    print(json.dumps(row))


if __name__ == "__main__":
    main()
