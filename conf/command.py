"""The command `quintet ...`, which equals `python run.py ...` in any folder."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run `run.py` with the arguments of this process.

    Exits with an error message if `run.py` is not installed next to it.
    """
    script = Path(__file__).resolve().parent.parent / "run.py"
    if not script.is_file():
        sys.exit("error: quintet runs from its own folder: install it there with pip install --editable .")
    sys.argv[0] = str(script)
    runpy.run_path(sys.argv[0], run_name="__main__")
