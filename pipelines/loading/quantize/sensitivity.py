"""Measure how much each layer's format costs, and write the plan of formats within a budget (quant=auto)."""

import json
import logging
import os
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import torch

from conf.decoding import DecodeConfig
from conf.quantization import QuantConfig
from pipelines.jobs.report import ProgressSink
from pipelines.loading.assembly import assemble
from pipelines.loading.format_plan import plan_text
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_source import ModelSource
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.calibration_data import read_calibration_data
from pipelines.loading.quantize.job import QuantizeJob
from pipelines.loading.quantize.report import Predictions
from pipelines.loading.request_settings import read_request_settings
from quantization.allocation import Candidate, allocate
from quantization.auto import Group, check_budget, find_groups, free_bytes, measure
from quantization.importance import read_importance

log = logging.getLogger(__name__)


def write_auto_plan(
    job: QuantizeJob, source: ModelSource, device: torch.device, target: Path, progress: ProgressSink
) -> None:
    """Choose the formats of `job.quant` for the float model of `source`, and write the plan into `target`.

    The measured losses are kept next to it, so that another budget is not measured again. Raises UserError for a budget
    that no choice of formats meets, and for texts that cannot be read.
    """
    plan = plan_model(job.model, QuantConfig(), source, device, packed=False)
    groups, max_bytes = find_groups(plan.model, job.quant, device), free_bytes(plan.model, job.quant, plan.dtype)
    check_budget(groups, max_bytes, job.quant)
    for_any_budget = replace(job, quant=replace(job.quant, bits=None, max_bytes=None))
    losses_file = target.with_name(f"{for_any_budget.default_target(source).name}.losses.json")
    if not losses_file.is_file():
        candidates = _measure_groups(job, plan, groups, progress)
        _write(losses_file, json.dumps([[asdict(candidate) for candidate in group] for group in candidates], indent=1))
    candidates = [
        [Candidate(**values) for values in group] for group in json.loads(losses_file.read_text(encoding="utf-8"))
    ]
    chosen = allocate(candidates, max_bytes)
    formats = {name: choice.format for group, choice in zip(groups, chosen, strict=True) for name in group.names}
    num_bytes, num_weights = sum(choice.num_bytes for choice in chosen), sum(group.num_weights for group in groups)
    counts = ", ".join(f"{count} in {format}" for format, count in sorted(Counter(formats.values()).items()))
    summary = (
        f"{num_bytes / 1e6:,.1f} MB, {8 * num_bytes / num_weights:.2f} bits per weight; layers: {counts}; "
        f"expected divergence {sum(choice.loss for choice in chosen):.3g} nats"
    )
    _write(target, plan_text(formats, f"{job.model.path}: {summary}"))
    method = "" if job.quant.imatrix is None else f" quant.method={job.quant.method.name}"
    log.warning(
        "quant=auto: %s; the plan is in %s: quant=auto%s quant.plan=FILE uses it again", summary, target, method
    )


def _measure_groups(
    job: QuantizeJob, plan: ModelPlan, groups: list[Group], progress: ProgressSink
) -> list[list[Candidate]]:
    settings = read_request_settings(job.model, plan.source)
    are_prompts = plan.source.shape.capabilities.needs_whole_prompt
    data = read_calibration_data(job.calibrate, settings.tokenizer, settings.context.num_tokens, are_prompts)
    log.warning("quant=auto: measuring %d groups of layers on texts from %s", len(groups), data.source)
    importance = dict[str, torch.Tensor]()
    if job.quant.imatrix is not None:
        model_type = plan.source.checkpoint.config.require("model_type", str)
        importance = read_importance(job.quant.imatrix, plan.model, model_type)
    with progress.calibrating():
        engine = assemble(plan, job.device, DecodeConfig(), settings, 1, progress.loaded)
        engine.executor.stop_recording()
        predictions = Predictions(engine, data.samples)

        def divergence() -> float:
            return predictions.compared_with(engine)["kl_mean"] or 0.0

        candidates = []
        for number, group in enumerate(groups):
            candidates.append(measure(engine.executor.model, group, plan.device, importance, divergence))
            progress.quantized(number + 1, len(groups))
    return candidates


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
