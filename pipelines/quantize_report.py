"""What quantisation changed: predictions on held-out text before and after, errors of each layer, as report.md and a picture.

R scored tokens, V tokens in the vocabulary.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.schema import RunConfig
from pipelines.engine import Engine
from pipelines.scoring import LOGIT_ROWS, Window
from quantization.quantizer import LinearReport

REPORT, PICTURE = "report.md", "errors.png"
MOST_TOKENS = 1024  # whose predictions are remembered: [1024, V] in float32


class Predictions:
    """What an engine predicts for each token of some texts but their first."""

    def __init__(self, engine: Engine, texts: list[list[int]]) -> None:
        per_text = max(2, MOST_TOKENS // len(texts))
        self._windows = [Window(text[-per_text:], len(text[-per_text:]) - 1) for text in texts if len(text) > 1]
        self._log_probabilities = [self._predict(engine, window) for window in self._windows]

    def compared_with(self, engine: Engine) -> dict[str, float]:
        """perplexity before and of `engine`, mean KL(before || engine) in nats, and the share of equal most likely tokens."""
        sums = torch.zeros(4, dtype=torch.float64)
        for window, before in zip(self._windows, self._log_probabilities, strict=True):
            after = self._predict(engine, window)
            targets = torch.tensor(window.token_ids[1:])[:, None]
            sums[0] -= before.gather(1, targets).sum(dtype=torch.float64)
            sums[1] -= after.gather(1, targets).sum(dtype=torch.float64)
            sums[2] += (before.exp() * (before - after)).sum(dtype=torch.float64)
            sums[3] += (before.argmax(1) == after.argmax(1)).sum()
        nll_before, nll, kl, agreed = (sums / sum(window.num_scored for window in self._windows)).tolist()
        return {
            "perplexity_before": math.exp(nll_before),
            "perplexity": math.exp(nll),
            "kl_mean": kl,
            "top1_agreement": agreed,
        }

    @torch.inference_mode()
    def _predict(self, engine: Engine, window: Window) -> Tensor:
        """Log probabilities [R, V] float32."""
        hidden = engine.hidden_states([window.token_ids[:-1]], [window.num_scored])
        rows = [engine.runner.logits(part).float().log_softmax(-1).cpu() for part in hidden.split(LOGIT_ROWS)]
        return torch.cat(rows)


def write_report(
    folder: Path, run: RunConfig, source: str, reports: list[LinearReport], metrics: dict[str, Any]
) -> None:
    before, after = metrics["weight_bytes_before"], metrics["weight_bytes"]
    lines = [
        f"# {Path(run.model.path).name}: quant={run.quant.scheme.name}, method={run.quant.method.name}",
        "",
        f"Calibrated on {run.calibrate.num_samples} samples of at most {run.calibrate.sequence_length} tokens from {source}.",
        "",
        "| on held-out text | float | quantised |",
        "|---|---|---|",
        f"| perplexity | {metrics['perplexity_before']:.4f} | {metrics['perplexity']:.4f} |",
        f"| KL divergence (nats) | | {metrics['kl_mean']:.3g} |",
        f"| equal most likely tokens | | {metrics['top1_agreement']:.2%} |",
        f"| weights (MB) | {before / 1e6:.1f} | {after / 1e6:.1f} ({1 - after / before:.0%} less) |",
        "",
        f"Errors of a layer's outputs, relative, on calibration data ({PICTURE}):",
        "",
        "| layer | scheme | rounded to nearest | this method | |",
        "|---|---|---|---|---|",
        *(f"| {r.name} | {r.scheme} | {_share(r.rounded_error)} | {_share(r.error)} | {r.note} |" for r in reports),
    ]
    (folder / REPORT).write_text("\n".join(lines) + "\n", encoding="utf-8")
    _draw(folder / PICTURE, reports)


def _share(error: float | None) -> str:
    return "-" if error is None else f"{error:.3%}"


def _draw(file: Path, reports: list[LinearReport]) -> None:
    from matplotlib.figure import Figure  # not at the top: only this task needs it

    known = [(r.rounded_error, r.error) for r in reports if r.rounded_error is not None and r.error is not None]
    figure = Figure(figsize=(max(6, 0.12 * len(known)), 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([rounded for rounded, _ in known], ".", color="C7", label="rounded to nearest")
    axes.plot([error for _, error in known], ".", color="C0", label="this method")
    axes.set(xlabel="linear layer, in the model's order", ylabel="relative output error", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
