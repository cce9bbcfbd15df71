"""The folders of a sweep's jobs, written by hand, and the tables that a sweep makes of them."""

import csv
import json
from pathlib import Path
from typing import Any

from conf.selection import KNOWN
from pipelines.tasks.sweep import write_sweep
from pipelines.tasks.sweep_jobs import Sweep

METRICS = {
    "decode_tokens_per_s": 123.456,
    "time_to_first_token_s": {"p50": 0.0123, "p90": 0.02},
    "peak_memory_bytes": 512_000_000,
    "unused_fields": ["x"],
}


def check_names(metrics: dict[str, Any]) -> None:
    """Check that sweep.select knows the names of a task's numbers."""
    names = [name for name, value in metrics.items() if isinstance(value, int | float | dict) and name != "tasks"]
    assert [name for name in names if not name.endswith("_stderr") and name not in KNOWN] == []


def leave(
    folder: Path,
    overrides: list[str],
    metrics: dict[str, Any] | None = None,
    error: str | None = None,
    sweep: str = "this",
    settings: dict[str, Any] | None = None,
) -> None:
    """Write the files of the job whose number is the folder's name."""
    folder.mkdir(parents=True)
    job = {"sweep": sweep, "number": int(folder.name), "overrides": overrides, "error": error}
    (folder / "job.json").write_text(json.dumps(job | (settings or {})))
    if metrics is not None:
        (folder / "metrics.json").write_text(json.dumps(metrics))


def write(sweep_dir: Path) -> str | None:
    return write_sweep(Sweep("this", str(sweep_dir)))


def rows(sweep_dir: Path) -> list[dict[str, str]]:
    with open(sweep_dir / "sweep.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
