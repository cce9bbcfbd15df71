"""Every kernel compiles for Hopper in every shape class, within its shared memory and without spilled registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.triton_cases import SHARED_BYTES

REPOSITORY = Path(__file__).resolve().parents[3]
# prefill over latents of 576 channels needs 56, 4,096 rows of float8 experts 48; all other launches none
STACK_BYTES = 64
# parts of names: every kernel, one kernel with every kind of codes, and the launches that leave the fewest registers
# and the least shared memory
TIGHT = (
    "attention decode 1 llama",
    "attention decode 64 int",
    "attention prefill gemma",
    "attention prefill fp8 static",
    "attention prefill float32",
    "attention alibi",
    "attention sinks",
    "attention window",
    "attention prefix",
    "attention latent",
    "kv_store int",
    "rows",
    "matmul 1 ",
    "matmul 16 w8a16",
    "matmul 4096",
    "sampling 128",
    "lora 64",
    "moe 1 mixtral-8x7b w4a16 g128",
    "moe 8 mixtral-8x7b floats",
    "moe 4096 mixtral-8x7b fp8",
    "moe 4096 mixtral-8x7b w8a8",
    "moe 4096 mixtral-8x7b nvfp4",
)


@pytest.mark.parametrize(
    "names",
    [pytest.param(TIGHT, id="tight", marks=pytest.mark.long), pytest.param((), id="all", marks=pytest.mark.matrix)],
)
def test_compiles_for_sm_90(names: tuple[str, ...]) -> None:
    """In a separate process, because this process runs kernels in the interpreter. `pytest -s` shows the table."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.compile_ahead", *names]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        print(row)
        assert row["shared"] <= SHARED_BYTES, row
        assert row["stack"] <= STACK_BYTES, row
        if (
            row["kernel"] in ("_attend", "_rows", "_product")
            and "float32" not in row["case"]
            and " g32 " not in row["case"]
        ):
            assert row["wgmma"] or "decode" in row["case"] or "prefix" in row["case"], row
    assert len({row["kernel"] for row in rows}) == 28, "the number of kernels in kernels/*/triton.py and chunks.py"
