"""The share of the engine's own loop in a decode step: `python tests/bench/loop.py --batch 16 model.path=FOLDER
device=cpu`.

Prints the median milliseconds of each phase of a step, and the share of all phases except the forward pass.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.compose import compose_run_config  # noqa: E402
from conf.schema import DecodeConfig  # noqa: E402
from pipelines.engine import step_loop  # noqa: E402
from pipelines.loading.load_engine import load_engine  # noqa: E402

WARMUP = 8  # warm-up steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    engine = load_engine(compose_run_config(args.overrides), args.batch)
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(owner: Any, name: str, phase: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def wrapper(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            seconds[phase].append(time.perf_counter() - start)
            return result

        setattr(owner, name, wrapper)

    timed(engine.scheduler, "plan", "plan")
    timed(step_loop, "build_batch", "build the batch")
    timed(engine.executor, "execute", "forward")
    timed(step_loop, "choose_tokens", "sample")
    timed(engine.scheduler, "commit", "commit")
    timed(engine, "_accept", "detokenise")
    timed(engine, "step", "step")
    decode = DecodeConfig(max_new_tokens=args.new, temperature=0.0, ignore_eos=True, prefix_cache=False)
    prompts = [[(31 * row + 7 * i) % 1000 + 5 for i in range(args.prompt)] for row in range(args.batch)]
    list(engine.generate(engine.request(i, prompt, decode) for i, prompt in enumerate(prompts)))
    middle = {phase: 1000 * statistics.median(values[WARMUP:]) for phase, values in seconds.items()}
    loop = [1000 * (step - forward) for step, forward in zip(seconds["step"], seconds["forward"], strict=True)][WARMUP:]
    row = {
        "overrides": args.overrides,
        "batch": args.batch,
        "median_ms": {phase: round(value, 3) for phase, value in middle.items()},
        "loop_ms": round(statistics.median(loop), 3),
        "loop_share": round(statistics.median(loop) / middle["step"], 4),
    }
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
