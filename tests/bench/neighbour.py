"""How much a process that computes on one of our cores slows a product down: `python tests/bench/neighbour.py`.

Quiet and disturbed rounds alternate. Prints the median over the rounds of the time with the other process divided by
the time without it, for our product and torch's. Our ratio may be at most 2.2.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kernels.linear import matmul, pack  # noqa: E402

ROUNDS, SECONDS = 15, 0.3


def calls_per_second(function: Callable[[], object]) -> float:
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        function()
        calls += 1
    return calls / (time.perf_counter() - start)


def main() -> None:
    core = max(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    weight, x = torch.randn(2048, 2048, dtype=torch.bfloat16), torch.randn(2, 2048, dtype=torch.bfloat16)
    packed = pack(weight)
    functions = {"ours": lambda: matmul(x, packed), "torch": lambda: functional.linear(x, weight)}
    slower: dict[str, list[float]] = {name: [] for name in functions}
    neighbour = subprocess.Popen([sys.executable, "-c", busy])
    try:
        for _ in range(ROUNDS):
            for name, function in functions.items():
                neighbour.send_signal(signal.SIGSTOP)
                quiet = calls_per_second(function)
                neighbour.send_signal(signal.SIGCONT)
                slower[name].append(quiet / calls_per_second(function))
    finally:
        neighbour.kill()
    print(
        json.dumps(
            {name: {"median": round(statistics.median(v), 2), "max": round(max(v), 2)} for name, v in slower.items()}
        )
    )


if __name__ == "__main__":
    main()
