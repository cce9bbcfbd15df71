"""Operators do not import a compiler, nor Triton on a machine without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fork_server import true_starts

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATORS = sorted(file.parent.name for file in (REPOSITORY / "kernels").glob("*/__init__.py"))

CODE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"kernels.{name}")
import torch
from kernels.rms_norm import rms_norm
rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
unwanted = ("triton", "torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd")
sys.exit(", ".join(name for name in unwanted if name in sys.modules) or None)
"""


@pytest.mark.long
def test_a_cpu_imports_neither_triton_nor_a_compiler() -> None:
    assert len(OPERATORS) >= 7
    command = [sys.executable, "-c", CODE, *OPERATORS]
    with true_starts():
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
