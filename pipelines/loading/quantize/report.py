"""The report of a quantisation, report.md and a picture: predictions before and after, and errors of each layer.

Dimensions: R scored tokens, V vocabulary entries.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.quantization import QuantScheme
from pipelines.engine import Engine
from pipelines.engine.operations import finite_logits
from pipelines.jobs import scoring
from pipelines.jobs.scoring import LOGIT_ROWS
from pipelines.loading.quantize.job import QuantizeJob
from quantization.quantizer import LinearReport

REPORT, PICTURE = "report.md", "errors.png"
MAX_TOKENS = 1024  # tokens whose predictions are kept: [1024, V] in float32


class Predictions:
    """Predictions of an engine for each token of the texts except the first token of each text.

    For models that see the whole prompt, only for the token after each prompt.
    """

    def __init__(self, engine: Engine, texts: list[list[int]]) -> None:
        self._are_prompts = engine.capabilities.needs_whole_prompt
        self._texts = measured_texts(texts, self._are_prompts)
        self._log_probabilities = [self._predict(engine, text) for text in self._texts]

    def compared_with(self, engine: Engine) -> dict[str, float | None]:
        """Return both perplexities, the mean KL(before || engine) in nats, and the share of equal top tokens.

        The perplexities are None for models that see the whole prompt.
        """
        nll_before, nll, kl, num_tokens, num_agreed = 0.0, 0.0, 0.0, 0, 0
        for text, before in zip(self._texts, self._log_probabilities, strict=True):
            after = self._predict(engine, text)
            if not self._are_prompts:
                targets = torch.tensor(text[1:])[:, None]
                nll_before -= float(before.gather(1, targets).sum(dtype=torch.float64))
                nll -= float(after.gather(1, targets).sum(dtype=torch.float64))
            kl += float((before.exp() * (before - after)).sum(dtype=torch.float64))
            num_agreed += int((before.argmax(1) == after.argmax(1)).sum())
            num_tokens += len(before)
        return {
            "perplexity_before": None if self._are_prompts else scoring.perplexity(nll_before / num_tokens),
            "perplexity": None if self._are_prompts else scoring.perplexity(nll / num_tokens),
            "kl_mean": kl / num_tokens,
            "top1_agreement": num_agreed / num_tokens,
        }

    @torch.inference_mode()
    def _predict(self, engine: Engine, text: list[int]) -> Tensor:
        """Return log probabilities [R, V] float32."""
        input_ids, num_outputs = (text, 1) if self._are_prompts else (text[:-1], len(text) - 1)
        hidden = engine.hidden_states([input_ids], [num_outputs])
        rows = [finite_logits(engine.executor, part).float().log_softmax(-1).cpu() for part in hidden.split(LOGIT_ROWS)]
        return torch.cat(rows)


def measured_texts(texts: list[list[int]], are_prompts: bool) -> list[list[int]]:
    """Return the ends of the texts, with MAX_TOKENS tokens in all. Whole prompts (`are_prompts`) are not cut."""
    per_text = max(2, MAX_TOKENS // len(texts))
    return texts if are_prompts else [text[-per_text:] for text in texts]


def write_report(
    folder: Path, job: QuantizeJob, source: str, reports: list[LinearReport], metrics: dict[str, Any]
) -> None:
    before, after = metrics["weight_bytes_before"], metrics["weight_bytes"]
    pruning = f", sparsity={job.quant.sparsity}" if "sparsity" in metrics else ""
    changed = "pruned" if pruning and job.quant.scheme is QuantScheme.none else "quantised"
    of_pruned = ". Errors of quantisation are relative to the pruned layer" if pruning else ""
    cache = [f"| KV cache | {job.model.dtype.name} | {job.quant.kv_cache.name}, a scale for each head |"]
    lines = [
        f"# {Path(job.model.path).name}: quant={job.quant.scheme.name}, method={job.quant.method.name}{pruning}",
        "",
        f"Calibrated on {job.calibrate.num_samples} samples of at most {job.calibrate.sequence_length} tokens from {source}.",
        "",
        f"| on held-out text | float | {changed} |",
        "|---|---|---|",
        f"| perplexity | {perplexity(metrics['perplexity_before'])} | {perplexity(metrics['perplexity'])} |",
        f"| KL divergence (nats) | | {metrics['kl_mean']:.3g} |",
        f"| equal most likely tokens | | {metrics['top1_agreement']:.2%} |",
        f"| weights (MB) | {before / 1e6:.1f} | {after / 1e6:.1f} ({max(0, 1 - after / before):.0%} less) |",
        *([f"| zeros of pruned layers, of all weights | | {metrics['sparsity']:.2%} |"] if pruning else ()),
        *(cache if job.quant.has_static_kv_cache else ()),
        "",
        f"Relative errors of a layer's outputs on calibration data ({PICTURE}){of_pruned}:",
        "",
        *_table(reports, bool(pruning)),
    ]
    (folder / REPORT).write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(folder / PICTURE, reports)


def _table(reports: list[LinearReport], with_pruning: bool) -> list[str]:
    names = ["layer", "scheme", *(("zeros", "pruned") if with_pruning else ()), "rounded to nearest", "this method", ""]
    rows = [names, ["---"] * len(names)]
    for r in reports:
        pruning = (_share(r.sparsity), _share(r.pruning_error)) if with_pruning else ()
        rows.append([r.name, r.scheme, *pruning, _share(r.rounded_error), _share(r.error), r.note])
    return [f"| {' | '.join(row)} |" for row in rows]


def perplexity(value: float | None) -> str:
    """Return a perplexity for people; `-` for None."""
    return "-" if value is None else f"{value:,.4f}"


def _share(error: float | None) -> str:
    return "-" if error is None else f"{error:.3%}"


def draw(file: Path, reports: list[LinearReport]) -> None:
    from matplotlib.figure import Figure  # here, because only this task needs it

    series = {
        "pruned": ("C1", [r.pruning_error for r in reports]),
        "rounded to nearest": ("C7", [r.rounded_error for r in reports]),
        "this method": ("C0", [r.error for r in reports]),
    }
    figure = Figure(figsize=(max(6, 0.12 * len(reports)), 4), layout="constrained")
    axes = figure.subplots()
    for label, (color, errors) in series.items():
        if any(error is not None for error in errors):
            axes.plot([math.nan if error is None else error for error in errors], ".", color=color, label=label)
    axes.set(xlabel="linear layer, in the model's order", ylabel="relative output error", yscale="log")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
