"""The C++ runner in tests: its calls, and damaged files for it."""

import subprocess
from pathlib import Path
from typing import Any


def call(runner: Path, folder: Path, *words: str, input_text: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run([runner, folder, *words], input=input_text, capture_output=True, text=True, timeout=60)


def leaves(value: Any) -> list[tuple[Any, Any]]:
    """Return the paths of all numbers and texts in a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    below = [place for key in keys for place in leaves(value[key])]
    return below + [(value, key) for key in keys if not isinstance(value[key], dict | list)]
