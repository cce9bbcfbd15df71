"""Matrix products compared with torch and with the machine's limits: `python tests/bench/matmul.py --rows 1 8 512`.

Shapes of Llama 1.1 B. In every round each variant runs several times in a row, so that its threads are awake, with
weights that exceed the caches. The best time counts, because other work on the machine only ever slows a call down.
Prints one line of JSON per shape: for few rows GB/s of weights read, else 10^9 operations per second. Needs AVX-512;
with AMX the limits are those of its tiles.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kernels import build  # noqa: E402
from kernels import linear as products  # noqa: E402
from kernels.quantize_rows import QuantizedActivations, quantize_rows  # noqa: E402

SHAPES = {
    "q, o": (2048, 2048),
    "k, v": (256, 2048),
    "gate, up": (5632, 2048),
    "down": (2048, 5632),
    "head": (32000, 2048),
}  # N, K
COLD_BYTES = 2**27  # several times the size of the caches
FEW_ROWS = 16
IN_A_ROW, FEW_IN_A_ROW = (
    2,
    5,
)  # torch's threads keep spinning after its product, and slow down the next call


def limits() -> build.Library:
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "c++",
            *build.FLAGS,
            "-shared",
            *build.INSTRUCTION_SETS[build.instruction_set()][1],
            f"{here}/limits.cpp",
            *(f"{build.KERNELS}/{name}.cpp" for name in ("operator", "threads")),
        ]
        subprocess.run([*command, "-o", f"{folder}/limits.so"], check=True)
        return build.Library(Path(folder) / "limits.so")


def int_codes(bits: int, num_outputs: int, num_inputs: int) -> torch.Tensor:
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (num_outputs, num_inputs), dtype=torch.int8)


def variants(num_outputs: int, num_inputs: int, num_rows: int) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return the bytes of the weight and the call, by variant."""
    x = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16)
    made: dict[str, tuple[float, Callable[[], object]]] = {}

    def several(nbytes: int, make: Callable[[], object]) -> "cycle[object]":
        return cycle([make() for _ in range(max(1, COLD_BYTES // nbytes))])

    size = num_outputs * num_inputs
    plain = several(2 * size, lambda: torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16))
    made["torch bf16"] = (2 * size, lambda: functional.linear(x, next(plain)))
    dense = products.pack(torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16))
    packed = several(dense.memory.nbytes, lambda: replace(dense, memory=dense.memory.clone()))
    made["bf16"] = (dense.memory.nbytes, lambda: products.matmul(x, next(packed)))
    for name, bits, group in (("int8", 8, num_inputs), ("int4 g128", 4, 128), ("int4 g32", 4, 32)):
        scales = torch.rand(num_outputs, -(-num_inputs // group))
        one = products.pack_codes(int_codes(bits, num_outputs, num_inputs), scales, None, bits)
        nbytes = one.memory.numel()
        weights = several(nbytes, lambda o=one: products.IntWeight(o.memory.clone(), *list(vars(o).values())[1:]))
        made[name] = (nbytes, lambda w=weights: products.matmul(x, next(w)))
        made[f"{name} a8"] = (
            nbytes,
            lambda w=weights: products.matmul(QuantizedActivations(*quantize_rows(x), x.dtype), next(w)),
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    machine, library = limits(), build.library()
    assert library is not None
    for target in (machine, library):
        if args.threads:
            target.set_threads(args.threads)
    torch.set_num_threads(library.get_threads())
    data = torch.ones(2**28, dtype=torch.uint8)
    address, size = ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(data.numel())
    pieces, repeats = 64, 2000
    random_tiles = torch.randn(2 * 16 * 512).bfloat16()
    for num_rows in args.rows:
        few = num_rows <= FEW_ROWS
        for name, (num_outputs, num_inputs) in SHAPES.items():
            calls = variants(num_outputs, num_inputs, num_rows)
            work = {
                key: (nbytes if few else 2.0 * num_rows * num_outputs * num_inputs)
                for key, (nbytes, _) in calls.items()
            }
            run = {key: call for key, (_, call) in calls.items()}
            if few:
                work["limit"], run["limit"] = (
                    data.numel(),
                    lambda: machine.read_all(address, size),
                )
            else:
                for key, operations in (("int8", 128), ("bfloat16", 64)):
                    dot = getattr(machine, f"dot_{key}")
                    work[f"limit {key}"] = 12.0 * operations * pieces * repeats
                    run[f"limit {key}"] = lambda dot=dot: dot(ctypes.c_int64(pieces), ctypes.c_int64(repeats))
                    if build.instruction_set() == "amx":
                        multiply = getattr(machine, f"tile_{key}")
                        work[f"limit {key}"] = 4.0 * 16384 * (2 if key == "int8" else 1) * pieces * repeats
                        run[f"limit {key}"] = lambda multiply=multiply: multiply(
                            random_tiles.data_ptr(), pieces, repeats
                        )
            best = dict.fromkeys(run, float("inf"))
            for _ in range(args.rounds):
                for key, call in run.items():
                    for _ in range(FEW_IN_A_ROW if few else IN_A_ROW):
                        start = time.perf_counter()
                        call()
                        best[key] = min(best[key], time.perf_counter() - start)
            rates = {key: round(work[key] / best[key] / 1e9, 1) for key in run}
            print(json.dumps({"rows": num_rows, "layer": name, "unit": "GB/s" if few else "G/s", **rates}), flush=True)


if __name__ == "__main__":
    main()
