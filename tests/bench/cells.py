"""Decode and prefill speed of each scheme, dtype and cache format of MODEL, or of each family, relative to the memory
bandwidth.

`python tests/bench/cells.py [MODEL] --out FILE.json [--formats PATTERN PATTERN] [--rows 1 16]`. MODEL has a
config.json; its weights are random. Without MODEL the rows are families in bfloat16 (family_configs.py), about 30 s
each with `--rows 1 --new 16 --repeats 1`.

Each cell runs in its own process. `--formats` takes patterns of names, `'int4*' 'artefact*'`, so that one measurement
can be split into several runs. `--models FOLDER` adds models that `task=quantize`, `task=convert` or other tools
have written, one per subfolder; only these cells have static activations, act-order or AWQ's order. GGUF types use
files of random blocks. The last line names the slowest cell of one row, by its share of the bandwidth.

The share of the bandwidth is decode tokens/s times the bytes that a step reads, divided by the bandwidth that the
process measures just afterwards. On shared machines memory may alternate between two speeds. A cell of one row is
therefore measured until two shares agree within 10 %, at most three times, and the row holds their means; `shares`
holds all of them. A family's prefill is compared with Llama's prefill just before, per operation (operations_per_token
in family_configs.py).
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from kernels.linear.block_weight import KINDS  # noqa: E402
from tests.bench.family_configs import chatglm_prompt, operations_per_token, write_configs  # noqa: E402
from tests.helpers.gguf_files import write_random_llama  # noqa: E402

SCHEMES = {
    "none": ["quant=none"],
    "int8": ["quant=int8"],
    "int8, groups of 128": ["quant=int8", "quant.group_size=128"],
    "int8, activations auto": ["quant=int8", "quant.activations=auto"],
    "int4": ["quant=int4", "quant.group_size=128"],
    "int4, zero points": ["quant=int4", "quant.group_size=128", "quant.symmetric=false"],
    "int4, activations auto": ["quant=int4", "quant.group_size=128", "quant.activations=auto"],
    "mxfp4": ["quant=mxfp4"],
    "nvfp4": ["quant=nvfp4"],
    "a8w8 dynamic": ["quant=a8w8", "quant.method=rtn", "quant.activations=dynamic"],
    "fp8 dynamic": ["quant=fp8"],
    "fp8 per tensor": ["quant=fp8", "quant.per_tensor=true"],
}
DTYPES = ("float32", "bfloat16", "float16")
CACHES = ("none", "int8", "fp8", "int4")
SHARE = "decode_share_of_bandwidth"
AGREEING, MAX_RUNS = 0.1, 3
METRICS = (
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    SHARE,
    "decode_share_unknown",
    "memory_bandwidth_bytes_per_s",
    "weight_bytes",
    "kv_bytes",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--formats", nargs="*", default=["*"], help="patterns of names")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "what": f"tokens/s and share of the bandwidth, {args.prompt} + {args.new} tokens, medians of {args.repeats}",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {processor()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"torch": version("torch")},
        "rows": [],
    }
    sizes = [f"bench.new_tokens={args.new}", f"bench.repeats={args.repeats}"]
    with tempfile.TemporaryDirectory() as folder:
        sources = models_in(args.models) if args.models else {}
        if args.model:
            sources |= schemes(args.model)
            if any(pattern.startswith(("*", "gguf")) for pattern in args.formats):
                sources |= block_files(args.model, Path(folder))
        all_cells = cells(sources) or family_cells(Path(folder))
        for name, overrides in all_cells.items():
            if not any(fnmatchcase(name, pattern) for pattern in args.formats):
                continue
            settings = [*overrides, *sizes, prompts(Path(folder), name, args.prompt)]
            for rows in args.rows:
                row = {"cell": name, "rows": rows}
                if name.startswith("family "):
                    families = Path(folder), name.removeprefix("family ")
                    row["prefill / llama"] = prefill_beside_llama(*families, args.prompt, args.repeats)
                settings_of_rows = [*settings, f"bench.batch_size={rows}"]
                row |= settled(settings_of_rows) if rows == 1 else measure(settings_of_rows)
                print(json.dumps(row), flush=True)
                report["rows"].append(row)
                report["slowest"] = slowest(report["rows"])
                # saved after each cell, so that an interrupted run keeps its results
                args.out.write_text(json.dumps(report, indent=2) + "\n")


def family_cells(folder: Path) -> dict[str, list[str]]:
    """Return each family's cell: its name and settings."""
    return {f"family {family.name}": [*random(family), "model.dtype=bfloat16"] for family in write_configs(folder)}


def prompts(folder: Path, name: str, num_tokens: int) -> str:
    """Return the setting for a cell's prompts: random prompts, except for ChatGLM-6B, which needs a prompt of its own
    from a file."""
    if name != "family chatglm":
        return f"bench.prompt_tokens={num_tokens}"
    data = folder / "prompts.jsonl"
    data.write_text(json.dumps({"prompt_token_ids": chatglm_prompt(num_tokens)}) + "\n")
    return f"bench.data={data}"


def cells(sources: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return each cell's name and settings: all dtypes and cache formats of each source."""
    return {
        f"{name}, {dtype}, cache {cache}": [*settings, f"model.dtype={dtype}", f"quant.kv_cache={cache}"]
        for name, settings in sources.items()
        for dtype in DTYPES
        for cache in CACHES
    }


def schemes(model: Path) -> dict[str, list[str]]:
    """Return the settings of each scheme of a model with random weights."""
    return {name: [*random(model), *quant] for name, quant in SCHEMES.items()}


def block_files(model: Path, folder: Path) -> dict[str, list[str]]:
    """Return the settings of each ggml type: files of random blocks, of a Llama whose widths are multiples of the block
    size."""
    config = json.loads((model / "config.json").read_text())
    if config["hidden_size"] % 256 or config.get("intermediate_size", 1) % 256:
        return {}
    rows = {}
    for kind in KINDS:
        file = folder / f"{kind}.gguf"
        rows[f"gguf {kind}"] = [f"model.path={file}", "model.tokenizer=null"]
        write_random_llama(file, model, kind)
    return rows


def slowest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the cell of one row whose decode has the smallest share of the bandwidth; None if no share is known."""
    known = [row for row in rows if row["rows"] == 1 and row.get("decode_share_of_bandwidth") is not None]
    return min(known, key=lambda row: float(row["decode_share_of_bandwidth"]), default=None)


def models_in(folder: Path) -> dict[str, list[str]]:
    """Return the settings of each model in a folder."""
    return {f"artefact {path.name}": [f"model.path={path}"] for path in sorted(folder.iterdir())}


def random(model: Path) -> list[str]:
    return [f"model.path={model}", "model.weights=random", "model.tokenizer=null"]


def measure(overrides: list[str]) -> dict[str, Any]:
    """Return the metrics of a bench in its own process, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "run.py", "task=bench", *overrides, f"hydra.run.dir={folder}"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        files = list(Path(folder).rglob("metrics.json"))
        if done.returncode or not files:
            return {"error": done.stderr.strip().splitlines()[-1:]}
        metrics = json.loads(files[0].read_text())
    return {name: metrics[name] for name in METRICS}


def settled(overrides: list[str]) -> dict[str, Any]:
    """Return the means of two benches whose shares of the bandwidth agree. If no two agree or a share is missing,
    return the last bench."""
    runs: list[dict[str, Any]] = []
    while len(runs) < MAX_RUNS:
        runs.append(measure(overrides))
        last, shares = runs[-1], [run.get(SHARE) for run in runs]
        if "error" in last or "fit the cache" in (last["decode_share_unknown"] or ""):
            return last
        for run in runs[:-1]:
            if last[SHARE] and run[SHARE] and abs(last[SHARE] - run[SHARE]) <= AGREEING * last[SHARE]:
                means = {name: (run[name] + last[name]) / 2 for name in METRICS if type(last[name]) in (int, float)}
                return last | means | {"shares": shares}
    return runs[-1] | {"shares": shares}


def prefill_beside_llama(folder: Path, family: str, num_tokens: int, repeats: int) -> float | None:
    """Return the ratio of a family's prompt operations per second to Llama's, measured in turns; None if a measurement
    failed."""
    speeds = []
    for name in ("llama", family):
        sizes = [prompts(folder, f"family {name}", num_tokens), "bench.new_tokens=1", f"bench.repeats={repeats}"]
        metrics = measure([*random(folder / name), "model.dtype=bfloat16", *sizes, "bench.batch_size=1"])
        if "error" in metrics:
            return None
        speeds.append(metrics["prefill_tokens_per_s"] * operations_per_token(folder / name, num_tokens))
    return float(speeds[1] / speeds[0])


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
