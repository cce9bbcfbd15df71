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
SCHEMES = ("auto, 95 MB", "auto, 106 MB", "auto, 130 MB", "int8", "a8w8", "fp8", "int4", "q4_k_m", "q5_k_m", "q6_k")
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
    for name, color, marker, is_shown in (
        ("Quintet", "C0", "o", lambda scheme: scheme in SCHEMES),
        ("llama.cpp's types", "0.55", "s", lambda scheme: scheme.startswith(FILES)),
    ):
        points = [
            (row["weight_bytes"] / 1e6, row["perplexity"], row["scheme"].removeprefix(FILES))
            for row in rows
            if is_shown(row["scheme"]) and row["perplexity"] < floats * HIGHEST
        ]
        axes.scatter(
            [size for size, _, _ in points], [value for _, value, _ in points], c=color, marker=marker, label=name
        )
        for size, value, label in points:
            axes.annotate(label, (size, value), xytext=(4, 3), textcoords="offset points", fontsize=8, color=color)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("weights in memory, MB")
    axes.set_ylabel("perplexity")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
