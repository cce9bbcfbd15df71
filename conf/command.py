"""`quintet ...`, which equals `python run.py ...` in any folder."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run `run.py` with the arguments of this process."""
    script = str(Path(__file__).resolve().parent.parent / "run.py")
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")
