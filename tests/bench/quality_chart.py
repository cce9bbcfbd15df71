"""Draw perplexity over the weights' size: `python tests/bench/quality_chart.py REPORT.json PICTURE.png`.

REPORT.json is written by quality.py. `quality_smollm2.png` of the README of quantization shows
`quality_smollm2.json`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

TITLES = {"first": "published weights (on a 4-bit grid)", "second": "weights moved within their cells of the grid"}
FILES = "gguf "  # begins the names of files with llama-quantize's bytes
AUTO = tuple(f"auto, {size} MB" for size in (95, 106, 130))
SERIES = (  # name, colour, marker and line, schemes
    ("Quintet, auto", "C0", "o-", AUTO),
    ("Quintet, auto with imatrix", "C2", "o-", tuple(f"{name}, imatrix" for name in AUTO)),
    ("Quintet, other schemes", "C0", "o", ("int8", "a8w8", "fp8")),
    (
        "llama.cpp's types",
        "0.55",
        "s",
        tuple(f"{FILES}{name}" for name in ("q4_0", "q4_1", "q3_k_m", "q4_k_m", "q5_k_m", "q8_0")),
    ),
)
HIGHEST = 1.25  # of the float model's perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    report = json.loads(args.report.read_text())
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(f"Perplexity of {report['model'].split('.')[0]} on wikitext-2", fontsize=11)
    for axes, (twin, title) in zip(figure.subplots(1, 2), TITLES.items(), strict=True):
        draw(axes, title, [row for row in report["rows"] if row["twin"] == twin])
    figure.savefig(args.picture, dpi=110)


def draw(axes: Any, title: str, rows: list[dict[str, Any]]) -> None:
    floats = next(row["perplexity"] for row in rows if row["scheme"] == "none")
    axes.axhline(floats, color="0.5", linewidth=0.8, linestyle=":")
    for name, color, style, schemes in SERIES:
        points = [
            (row["weight_bytes"] / 1e6, row["perplexity"], row["scheme"].removeprefix(FILES))
            for row in rows
            if row["scheme"] in schemes and row["perplexity"] < floats * HIGHEST
        ]
        axes.plot([size for size, _, _ in points], [value for _, value, _ in points], style, color=color, label=name)
        for size, value, label in points if "auto" not in name else ():
            axes.annotate(label, (size, value), xytext=(4, 4), textcoords="offset points", fontsize=8, color=color)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("weights in memory, MB")
    axes.set_ylabel("perplexity")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
