"""Every kernel compiles for Hopper in every shape class, within its shared memory and without spilled registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SHARED_BYTES = 227 * 1024  # of a program on compute capability 9.0
STACK_BYTES = 64  # prefill over latents of 576 channels needs 56; all others none


@pytest.mark.long
def test_compiles_for_sm_90() -> None:
    """In a process of its own, because what is imported here is interpreted. `pytest -s` shows the table."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.compile_ahead"]
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
    assert len({row["kernel"] for row in rows}) == 20
