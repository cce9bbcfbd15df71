"""Peak memory of the predict job for few and for many rows: `python tests/bench/flat_memory.py [--rows N ...]`.

Each job predicts rows of one token with the bundled model on the CPU, in its own process. Writes
tests/bench/results/flat_memory.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).parent / "results" / "flat_memory.json"
OVERRIDES = [
    "device=cpu",
    "device.threads=1",
    "model.dtype=float32",
    "decode.max_new_tokens=1",
    "predict.batch_size=64",
]


def measure(num_rows: int, folder: Path) -> dict[str, float]:
    """Measure a job with this number of rows."""
    data = folder / f"{num_rows}.txt"
    data.write_text("a\n" * num_rows)
    command = [sys.executable, "run.py", *OVERRIDES, f"predict.data={data}", f"hydra.run.dir={folder / str(num_rows)}"]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"the job of {num_rows} rows ended with {process.returncode}")
    return {"rows": num_rows, "seconds": time.perf_counter() - start, "peak_rss_mb": usage.ru_maxrss / 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 200_000])
    with tempfile.TemporaryDirectory() as folder:
        jobs = [measure(num_rows, Path(folder)) for num_rows in parser.parse_args().rows]
    for job in jobs:
        print(f"{job['rows']:>9,} rows: peak {job['peak_rss_mb']:,.0f} MB, {job['seconds']:.0f} s")
    sys.path.insert(0, str(REPOSITORY))
    from pipelines.jobs.report import environment

    machine = environment()
    packages = machine["packages"]
    about = {
        "date": date.today().isoformat(),
        "cpu": machine["cpu"],
        "torch": packages["torch"],
        "overrides": OVERRIDES,
    }
    RESULT.write_text(json.dumps({**about, "jobs": jobs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
