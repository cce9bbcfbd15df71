"""Measure how much each layer's format costs, and write the plan of formats within a budget (quant=auto)."""

import logging
import os
from collections import Counter
from pathlib import Path

import torch

from conf.decoding import DecodeConfig
from conf.quantization import QuantConfig
from pipelines.jobs.report import ProgressSink
from pipelines.loading.assembly import assemble
from pipelines.loading.format_plan import write_plan
from pipelines.loading.model_source import ModelSource
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.calibration_data import read_calibration_data
from pipelines.loading.quantize.job import QuantizeJob
from pipelines.loading.quantize.report import Predictions
from pipelines.loading.request_settings import read_request_settings
from quantization.allocation import allocate
from quantization.auto import check_budget, find_groups, free_bytes, measure

log = logging.getLogger(__name__)


def write_auto_plan(
    job: QuantizeJob, source: ModelSource, device: torch.device, target: Path, progress: ProgressSink
) -> None:
    """Measure the float model of `source`, and write the plan of `job.quant` into `target`.

    Raises UserError for a budget that no choice of formats meets, and for texts that cannot be read.
    """
    settings = read_request_settings(job.model, source)
    plan = plan_model(job.model, QuantConfig(), source, device, packed=False)
    are_prompts = source.shape.capabilities.needs_whole_prompt
    data = read_calibration_data(job.calibrate, settings.tokenizer, settings.context.num_tokens, are_prompts)
    groups, max_bytes = find_groups(plan.model, job.quant, device), free_bytes(plan.model, job.quant, plan.dtype)
    check_budget(groups, max_bytes, job.quant)
    log.warning("quant=auto: measuring %d groups of layers on texts from %s", len(groups), data.source)
    with progress.calibrating():
        engine = assemble(plan, job.device, DecodeConfig(), settings, 1, progress.loaded)
        engine.executor.stop_recording()
        predictions = Predictions(engine, data.samples)

        def divergence() -> float:
            return predictions.compared_with(engine)["kl_mean"] or 0.0

        candidates = []
        for number, group in enumerate(groups):
            candidates.append(measure(engine.executor.model, group, device, divergence))
            progress.quantized(number + 1, len(groups))
    chosen = allocate(candidates, max_bytes)
    formats = {name: choice.format for group, choice in zip(groups, chosen, strict=True) for name in group.names}
    num_bytes, num_weights = sum(choice.num_bytes for choice in chosen), sum(group.num_weights for group in groups)
    counts = ", ".join(f"{count} in {format}" for format, count in sorted(Counter(formats.values()).items()))
    summary = (
        f"{num_bytes / 1e6:,.1f} MB, {8 * num_bytes / num_weights:.2f} bits per weight; layers: {counts}; "
        f"expected divergence {sum(choice.loss for choice in chosen):.3g} nats"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_suffix(".new")
    write_plan(made, formats, f"{job.model.path}: {summary}")
    os.replace(made, target)
    log.warning("quant=auto: %s; the plan is in %s: quant=auto quant.plan=FILE uses it again", summary, target)
