"""The chart of the README: `python tests/bench/chart.py tests/bench/results/peers_cpu_kernels.json tests/bench/results/cpu.png`."""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = {"Quintet": "C0", "other": "0.7"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    report = json.loads(args.rows.read_text())
    panels = [panel for row in report["rows"] for panel in panels_of(row)]
    figure = Figure(figsize=(4.2 * len(panels), 4.2), layout="constrained")
    for axes, (title, speeds) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, title, speeds)
    figure.suptitle(f"Llama, 1.1 billion parameters, on {report['machine']}: tokens/s", fontsize=11)
    figure.savefig(args.picture, dpi=110)


def panels_of(row: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Title, and tokens/s by engine. With several sequences only the decode is of interest."""
    phases = {"decode": f"decode, batch {row['batch']}"}
    if row["batch"] == 1:
        phases["prefill"] = f"prefill of {row['prompt_tokens']} tokens"
    return [
        (title, {name: speed[phase] for name, speed in row["tokens_per_s"].items()}) for phase, title in phases.items()
    ]


def draw(axes: Any, title: str, speeds: dict[str, float]) -> None:
    names = sorted(speeds, key=speeds.__getitem__)
    shown = [name.replace("ours", "Quintet").replace("-", " ", 1) for name in names]
    colours = [COLOURS["Quintet" if name.startswith("ours") else "other"] for name in names]
    bars = axes.barh(shown, [speeds[name] for name in names], color=colours)
    axes.bar_label(bars, fmt=lambda speed: f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}", padding=3, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
