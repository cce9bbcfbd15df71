"""Compile every launch of every kernel for sm_90, in the shapes of real models, on a machine without a GPU.

Prints one JSON line per launch: case, kernel, registers per thread, bytes of shared memory, bytes of stack per thread
(spilled registers), instructions for Hopper's matrix units. The tensors are on the device "meta", so a launcher that
reads a value, and would therefore wait for a GPU, fails here.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.helpers.triton_shapes import CASES

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Hopper:
    """The parts of a driver that compilation needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(compiled: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert match, text
    registers, stack, local = map(int, match.groups())
    return {
        "registers": registers,
        "shared": compiled.metadata.shared,
        "stack": stack + local,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
    }


def compile_cases(cases: dict[str, Callable[[], None]]) -> None:
    driver.set_active(Hopper())
    launch = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        row = {"case": case, "kernel": self.fn.__name__, **resources(compiled)}
        print(json.dumps(row), flush=True)

    JITFunction.run = compile_only
    for case in cases:
        with torch.device("meta"):
            cases[case]()


if __name__ == "__main__":
    names = sys.argv[1:]
    compile_cases({case: run for case, run in CASES.items() if not names or any(name in case for name in names)})
