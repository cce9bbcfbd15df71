"""The committed result of `make test-matrix`: date, revision, numbers of tests."""

import json
import subprocess
import time
from collections.abc import Sized
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def write_record(file: Path, stats: dict[str, Sized], seconds: float) -> None:
    """Write the record. `stats`: the terminal reporter's reports by outcome."""
    git = ["git", "-C", str(REPOSITORY)]
    revision = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "revision": revision + (" with changes" if changed.strip() else ""),
        **{outcome: len(stats.get(outcome, ())) for outcome in ("passed", "failed", "error", "skipped")},
        "minutes": round(seconds / 60, 1),
    }
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
