"""A machine without a GPU never imports Triton for our kernels."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATORS = sorted(file.parent.name for file in (REPOSITORY / "kernels").glob("*/triton.py"))

CODE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"kernels.{name}")
import torch
from kernels.rms_norm import rms_norm
rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
sys.exit("triton" in sys.modules)
"""


def test_cpu_imports_no_triton() -> None:
    assert len(OPERATORS) >= 7
    assert subprocess.run([sys.executable, "-c", CODE, *OPERATORS], cwd=REPOSITORY).returncode == 0
