"""Find the fastest launches of a GPU's products: `python tests/bench/tune_gpu.py [--plan] [--only TEXT] [--minutes 9]`.

Rewrites kernels/tuned/<GPU>.json after each shape; commit the file. It contains only launches that were more than 2 %
faster than the constants. Entries of an earlier run with the same versions stay, so that `--only` can continue a run.
Shapes: of a model's linear layers, most used first. Shapes that exceed the time limit are printed.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from kernels.launches import Launch, Shape, entry_of, file_of, read, shape_of  # noqa: E402
from kernels.linear.gpu_weight import GPUWeight  # noqa: E402
from tests.bench.gpu import about, parser_of  # noqa: E402
from tests.bench.gpu_rows import Step, median_seconds, mixture, product, rotated  # noqa: E402
from tests.helpers.triton_cases import assert_near  # noqa: E402

KINDS = ("int4 g128", "int8", "a8w8", "fp8")
MODELS = {  # outputs, inputs of q, k and v; o; gate and up; down
    "Llama-3.1-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Llama-2-7B": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)),
    "Qwen2.5-1.5B": ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)),
}
HEADS = (128256, 4096), (32000, 4096)  # in int8 under `quant=int4`, and only for few rows: a prompt uses one row of it
ONE_ROW = [
    Launch(outputs, 1, warps, 3)  # without 32 by 2 warps: int4 in groups of 128 spills 664 bytes per thread
    for outputs, warps in ((4, 1), (4, 2), (8, 2), (8, 4), (16, 2), (16, 8), (32, 4), (32, 8))
]
WORTH = 0.98  # largest share of the constants' time; a smaller gain is noise
WORKERS = os.cpu_count() or 1


class Case(NamedTuple):
    """A shape, and its product as tests/bench/gpu.py times it."""

    kernel: str
    kind: str
    rows: int
    outputs: int
    inputs: int

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.kind}, {self.rows} rows, {self.outputs} x {self.inputs}"

    def steps(self) -> list[Step]:
        if self.kernel != "product":
            tokens = 1 if self.rows == 1 else min(4 * self.rows, 8192)  # each row uses two of eight experts
            return mixture(self.kind, tokens)
        return rotated(
            partial(product, self.kind, self.rows, self.outputs, self.inputs), self.outputs * self.inputs / 2
        )

    @property
    def tolerance(self) -> float | None:
        """Return the tolerance of tests/kernels/triton/test_moe.py if rows between the two products may round to other
        codes; None: the dtype's."""
        return 3e-2 if self.kernel != "product" and self.kind in ("a8w8", "fp8") else None

    def candidates(self) -> list[Launch]:
        return ONE_ROW if self.rows == 1 else large_tiles() if self.rows > 64 else small_tiles(self.rows)


def small_tiles(rows: int) -> list[Launch]:
    return [Launch(outputs, rows, 4, stages) for outputs in (32, 64, 128) for stages in (3, 5)]


def large_tiles() -> list[Launch]:
    tiles = (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 256, 8)
    return [Launch(*tile, stages) for tile in tiles for stages in (3, 4)]


def cases() -> list[Case]:
    """Return the shapes that decode one request, then several requests, then prompts."""
    shapes = dict.fromkeys(shape for shapes in MODELS.values() for shape in shapes)
    kernels = [("product", shape) for shape in shapes]
    kernels += [("gated experts", (14336, 4096)), ("weighted experts", (4096, 14336))]
    products = [(kernel, kind, shape) for kernel, shape in kernels for kind in KINDS]
    heads = [("product", "int8", shape) for shape in HEADS]
    return [
        Case(kernel, kind, rows, *shape)
        for rows in (1, 32, 16, 64, 256, 4096)
        for kernel, kind, shape in products + (heads if rows <= 256 else [])
    ]


class Launching:
    """Replaces `tuned_launch`: returns `launch` for one kernel, or the constants if it is None, and keeps the requested
    shape."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self.launch: Launch | None = None
        self.shape: Shape | None = None

    def __call__(self, kernel: str, rows: int, x: torch.Tensor, weight: GPUWeight) -> Launch | None:
        if kernel != self._kernel:
            return None
        self.shape = shape_of(kernel, rows, x.dtype, weight)
        return self.launch


def attempt(
    steps: list[Step],
    launching: Launching,
    candidates: Iterable[Launch],
    seconds_of: Callable[[list[Step]], float],
    tolerance: float | None = None,
) -> tuple[dict[Launch, float], float]:
    """Return the median seconds by launch, and of the constants.

    A launch counts if its result equals the constants' within the tolerance of the tests. Launches that need more
    shared memory than the GPU has do not run.
    """
    launching.launch = None
    expected = steps[0][0]()
    default_s = seconds_of(steps)
    seconds: dict[Launch, float] = {}
    for launch in candidates:
        launching.launch = launch
        try:
            assert_near(steps[0][0](), expected, tolerance)
            seconds[launch] = seconds_of(steps)
        except Exception as error:
            print(f"  {launch}: {one_line(error)}")
    return seconds, default_s


def best(seconds: dict[Launch, float], default_s: float) -> Launch | None:
    """Return the fastest launch; None if no launch is worth an entry."""
    launch = min(seconds, key=seconds.__getitem__, default=None)
    return launch if launch and seconds[launch] < WORTH * default_s else None


def tune(
    case: Case, seconds_of: Callable[[list[Step]], float] = median_seconds
) -> tuple[dict[Launch, float], float, Shape]:
    launching = Launching(case.kernel)
    with (
        patch("kernels.linear.triton.tuned_launch", launching),
        patch("kernels.moe.triton.tuned_launch", launching),
    ):
        seconds, default_s = attempt(case.steps(), launching, case.candidates(), seconds_of, case.tolerance)
    assert launching.shape
    return seconds, default_s, launching.shape


def compile_case(case: Case) -> None:
    """In a separate process: compile the launches that `tune` will run, into Triton's cache on disk."""
    with suppress(Exception):  # `tune` reports the error
        tune(case, lambda steps: 0.0)
    torch.cuda.empty_cache()


class Tuned:
    """The GPU's file."""

    def __init__(self, gpu: dict[str, Any]) -> None:
        self._gpu, self._path = gpu, file_of(gpu["gpu"])
        self._entries: dict[Shape, dict[str, Any]] = {}
        known = read(gpu["gpu"])
        old = json.loads(self._path.read_text()) if known else {}
        if all(old.get(name) == gpu[name] for name in gpu if name != "date"):
            self._entries = dict(zip(known, old["entries"], strict=True))

    def add(self, shape: Shape, seconds: dict[Launch, float], default_s: float) -> Launch | None:
        """Set the entry of this shape."""
        self._entries.pop(shape, None)
        if launch := best(seconds, default_s):
            self._entries[shape] = entry_of(shape, launch, seconds[launch], default_s)
        self._path.parent.mkdir(exist_ok=True)
        document = self._gpu | {"entries": list(self._entries.values())}
        self._path.write_text(json.dumps(document, indent=1) + "\n")
        return launch


def outcome(case: Case, tuned: Tuned) -> str:
    """Return the result that was saved, or the error in one line."""
    try:
        seconds, default_s, shape = tune(case)
    except Exception as error:
        return one_line(error)
    launch = tuned.add(shape, seconds, default_s)
    return f"{1e6 * default_s:.1f} us " + (f"{1e6 * seconds[launch]:.1f} by {launch}" if launch else "stays")


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def main() -> None:
    start = time.monotonic()
    args = parser_of(__doc__, "shapes", 9.0).parse_args()
    todo = [case for case in cases() if args.only in case.name]
    if args.plan or not todo or not torch.cuda.is_available():
        print(*(case.name for case in todo), sep="\n")
        sys.exit(
            None if args.plan and todo else "nothing was measured: no shape has this name, or there is no NVIDIA GPU"
        )
    tuned, end = Tuned(about()), start + 60 * args.minutes
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        while todo and time.monotonic() < end:
            some = todo[:WORKERS]
            list(pool.map(compile_case, some))  # compile all before the first is timed: both need the same GPU
            while some and time.monotonic() < end:
                case = some.pop(0)
                todo.remove(case)
                print(f"{case.name}: {outcome(case, tuned)}", flush=True)
                torch.cuda.empty_cache()
    print(f"not measured: {len(todo)} shapes", *(case.name for case in todo), sep="\n")


if __name__ == "__main__":
    main()
