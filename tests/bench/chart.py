"""Draw the chart of the README, one line of panels per machine: `python tests/bench/chart.py REPORT.json [REPORT.json
...] PICTURE.png --files GGUF_FILES.json`.

The README's chart, `cpu.png`, shows `peers_cpu_kernels.json`, `peers_amx.json` and, of gguf_files.py,
`gguf_files_zen4.json` of tests/bench/results. A panel
compares engines of one row, which ran in turn in the same rounds. If several rows match, the panel shows the newest row
among those with the most engines.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# title, prompts per batch, phase, engines
PANELS = (
    ("decode, bfloat16", 1, "decode", ("ours-bf16", "llama.cpp-bf16", "vllm-bf16")),
    ("decode, 8-bit weights", 1, "decode", ("ours-int8", "llama.cpp-q8_0", "openvino-int8")),
    ("decode, 4-bit weights", 1, "decode", ("ours-int4", "llama.cpp-q4_0", "openvino-int4")),
    ("decode of 16 rows", 16, "decode", ("ours-int8-auto", "ours-bf16", "vllm-bf16")),
    ("prompt of 512 tokens", 1, "prefill", ("ours-a8w8-dynamic", "openvino-int4", "ours-bf16", "vllm-bf16")),
    ("prompt, 8-bit weights", 1, "prefill", ("openvino-int8", "ours-int8", "llama.cpp-q8_0")),
)
NAMES = {"ours": "Quintet", "vllm": "vLLM", "openvino": "OpenVINO", "dynamic": "", "bf16": "bfloat16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--files", type=Path, required=True)
    args = parser.parse_args()
    figure = Figure(figsize=(11, 4.2 * (1 + len(args.reports))), layout="constrained")
    figure.suptitle("Tokens per second, Llama of 1.1 billion parameters", fontsize=11)
    *parts, last = figure.subfigures(1 + len(args.reports), 1)
    draw_files(last, json.loads(args.files.read_text()))
    for part, file in zip(parts, args.reports, strict=True):
        report = json.loads(file.read_text())
        part.suptitle(report["machine"], fontsize=10)
        for axes, (title, batch, phase, engines) in zip(part.subplots(2, 3).flat, PANELS, strict=True):
            speeds = newest(report["rows"], batch, engines)
            draw(axes, title, {shown(name): speeds[name][phase] for name in engines if name in speeds})
    figure.savefig(args.picture, dpi=110)


def draw_files(part: Any, report: dict[str, Any]) -> None:
    """Draw two bars per GGUF file: Quintet and llama.cpp."""
    part.suptitle(f"GGUF files, {report['machine']}", fontsize=10)
    for axes, (title, phase) in zip(
        part.subplots(1, 2), (("prompt of 512 tokens", "prefill"), ("decode", "decode")), strict=True
    ):
        speeds = {
            name.removeprefix("1b_").removesuffix(".gguf").upper(): row[phase] for name, row in report["rows"].items()
        }
        bars = {
            f"{kind} {engine}": row[key]
            for kind, row in speeds.items()
            for engine, key in (("Quintet", "quintet"), ("llama.cpp", "llama.cpp"))
        }
        draw(axes, title, bars)


def newest(rows: list[dict[str, Any]], batch: int, engines: tuple[str, ...]) -> dict[str, Any]:
    """Return the speeds of the row with the most engines. Among several rows, the newest; within one day, the last."""
    fit = [(row["date"], i, row["tokens_per_s"]) for i, row in enumerate(rows) if row["batch"] == batch]
    speeds: dict[str, Any] = max(fit, key=lambda row: (len(set(engines) & row[2].keys()), row[0], row[1]))[2]
    return speeds


def shown(name: str) -> str:
    """Return `OpenVINO int8` for `openvino-int8`."""
    return " ".join(NAMES.get(part, part) for part in name.split("-")).strip()


def draw(axes: Any, title: str, speeds: dict[str, float]) -> None:
    """Draw one bar per engine, the first engine on top."""
    names = list(reversed(speeds))
    colours = ["C0" if "Quintet" in name else "0.7" for name in names]
    bars = axes.barh(names, [speeds[name] for name in names], color=colours)
    axes.bar_label(bars, fmt=lambda speed: f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}", padding=3, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


if __name__ == "__main__":
    main()
