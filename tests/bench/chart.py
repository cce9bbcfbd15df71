"""Draw the chart of the README: `python tests/bench/chart.py tests/bench/results/peers_cpu_kernels.json tests/bench/results/cpu.png`."""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# Title, row of the report, phase, engines. A panel compares what ran in turn in the same rounds.
PANELS = (
    ("decode, bfloat16", 0, "decode", ("ours-bf16", "llama.cpp-bf16", "vllm-bf16")),
    ("decode, 8-bit weights", 1, "decode", ("ours-int8", "llama.cpp-q8_0", "openvino-int8")),
    ("decode, 4-bit weights", 1, "decode", ("ours-int4", "llama.cpp-q4_0", "openvino-int4")),
    ("decode of 16 rows", 2, "decode", ("ours-int8-auto", "ours-bf16", "vllm-bf16")),
    ("prompt of 512 tokens", 0, "prefill", ("ours-a8w8-dynamic", "openvino-int4", "ours-bf16", "vllm-bf16")),
    ("prompt, 8-bit weights", 1, "prefill", ("openvino-int8", "ours-int8", "llama.cpp-q8_0")),
)
NAMES = {"ours": "Quintet", "vllm": "vLLM", "openvino": "OpenVINO", "dynamic": "", "bf16": "bfloat16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    report = json.loads(args.rows.read_text())
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (title, row, phase, engines) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        speeds = report["rows"][row]["tokens_per_s"]
        draw(axes, title, {shown(name): speeds[name][phase] for name in engines})
    figure.suptitle(f"Tokens per second, Llama of 1.1 billion parameters, {report['machine']}", fontsize=11)
    figure.savefig(args.picture, dpi=110)


def shown(name: str) -> str:
    """Return `OpenVINO int8` for `openvino-int8`."""
    return " ".join(NAMES.get(part, part) for part in name.split("-")).strip()


def draw(axes: Any, title: str, speeds: dict[str, float]) -> None:
    """Draw a bar for each engine, the first on top."""
    names = list(reversed(speeds))
    colours = ["C0" if name.startswith("Quintet") else "0.7" for name in names]
    bars = axes.barh(names, [speeds[name] for name in names], color=colours)
    axes.bar_label(bars, fmt=lambda speed: f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}", padding=3, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


if __name__ == "__main__":
    main()
