"""Perplexity and divergence of every scheme from the float model: `python tests/bench/quantisation.py MODEL TEXT
CALIBRATION [OVERRIDES]`.

Each cell is a separate run of task=evaluate, in float32 on the CPU. Prints a table, and writes the rows as JSON with
--json FILE. Each file of `--gguf FILE FILE` is the same model, quantised by another tool; with `--cells float` only
these cells and the float model are measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
INT4 = ["quant=int4", "quant.group_size=32"]
STATIC_CACHE = "quant.kv_cache_scales=static"
CELLS: dict[str, list[str]] = {
    "float": [],
    "int8": ["quant=int8"],
    "int8, auto": ["quant=int8", "quant.activations=auto"],
    "a8w8, rtn": ["quant=a8w8", "quant.method=rtn"],
    "a8w8": ["quant=a8w8"],
    "a8w8, static, rtn": ["quant=a8w8", "quant.activations=static", "quant.method=rtn"],
    "a8w8, static": ["quant=a8w8", "quant.activations=static"],
    "fp8": ["quant=fp8"],
    "fp8, static": ["quant=fp8", "quant.activations=static"],
    "fp8, gptq": ["quant=fp8", "quant.method=gptq"],
    "int4 g32, rtn": INT4,
    "int4 g32, rtn, auto": [*INT4, "quant.activations=auto"],
    "int4 g32, awq": [*INT4, "quant.method=awq"],
    "int4 g32, awq, auto_clip": [*INT4, "quant.method=awq", "quant.auto_clip=true"],
    "int4 g32, gptq": [*INT4, "quant.method=gptq"],
    "kv_cache int8": ["quant.kv_cache=int8"],
    "kv_cache int8, static": ["quant.kv_cache=int8", STATIC_CACHE],
    "kv_cache fp8": ["quant.kv_cache=fp8"],
    "kv_cache fp8, static": ["quant.kv_cache=fp8", STATIC_CACHE],
    "kv_cache int4": ["quant.kv_cache=int4"],
}
CALIBRATED = (", static", "gptq", "awq")  # parts of the names of cells that calibrate, with 64 samples of 256 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("calibration")
    parser.add_argument("--json")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--cells", nargs="*", default=[*CELLS], help="names: %(default)s")
    parser.add_argument("overrides", nargs="*", help="for all cells")
    args = parser.parse_args()
    data, samples = f"calibrate.data={args.calibration}", ["calibrate.num_samples=64", "calibrate.sequence_length=256"]
    rows, base = [], 0.0
    cells = {name: [f"model.path={args.model}", *CELLS[name]] for name in args.cells}
    cells |= {f"gguf {file.stem}": [f"model.path={file}", f"model.tokenizer={args.model}"] for file in args.gguf}
    for name, options in cells.items():
        texts = [data] if name.startswith("a8w8") and name != "a8w8, rtn" else []
        if any(word in name for word in CALIBRATED):
            texts = [data, *samples]
        metrics = evaluate(
            [
                f"evaluate.reference={args.model}",
                f"evaluate.data={args.text}",
                *options,
                *texts,
                *args.overrides,
            ]
        )
        base = base or metrics["perplexity"]
        rows.append(
            {
                "scheme": name,
                "perplexity": round(metrics["perplexity"], 5),
                "against_float": round(metrics["perplexity"] / base - 1, 5),
                "kl_mean": round(metrics["kl_mean"], 5),
                "weight_bytes": metrics["weight_bytes"],
            }
        )
        print(f"| {name} | {metrics['perplexity'] / base - 1:+.2%} | {metrics['kl_mean']:.4f} |", flush=True)
    result = {"date": str(date.today()), "model": Path(args.model).name, "text": Path(args.text).name, "rows": rows}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def evaluate(overrides: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        common = ["task=evaluate", "device=cpu", "model.dtype=float32", f"hydra.run.dir={folder}/run"]
        subprocess.run(
            [sys.executable, str(REPOSITORY / "run.py"), *common, *overrides], check=True, stdout=subprocess.DEVNULL
        )
        metrics: dict[str, float] = json.loads((Path(folder) / "run" / "metrics.json").read_text(encoding="utf-8"))
        return metrics


if __name__ == "__main__":
    main()
